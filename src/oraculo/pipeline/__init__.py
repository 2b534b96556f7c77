"""What users write: pipeline definitions, their faults, retries, and steps of other systems."""
