-- Which installation this database is, for what it shares with others.
CREATE TABLE oraculo_installation (id text NOT NULL);
INSERT INTO oraculo_installation (id) VALUES (md5(random()::text || clock_timestamp()::text));
