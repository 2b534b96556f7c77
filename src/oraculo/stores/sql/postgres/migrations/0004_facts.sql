-- What this installation is to remember of things outside of this database.
CREATE TABLE oraculo_facts (fact text PRIMARY KEY);
