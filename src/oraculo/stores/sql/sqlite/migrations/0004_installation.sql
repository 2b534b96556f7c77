-- Which installation this file is, for what it shares with others.
CREATE TABLE installation (id TEXT NOT NULL);
INSERT INTO installation (id) VALUES (lower(hex(randomblob(16))));
