"""Those who listen to what happens inside: metrics and logs, behind one hub."""
