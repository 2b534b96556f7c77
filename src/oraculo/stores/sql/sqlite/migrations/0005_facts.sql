-- What this installation is to remember of things outside of this file.
CREATE TABLE facts (fact TEXT PRIMARY KEY) WITHOUT ROWID;
