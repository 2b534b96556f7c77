-- `n` is a run's number in the order of creation: short to repeat in every row of its tasks and history, and the order
-- in which runs are listed. It is taken from `sequence` and never used twice, so that a cursor stays true.
-- `pipelines` is another number whenever a pipeline is put or deleted.
CREATE TABLE sequence (last INTEGER NOT NULL, pipelines INTEGER NOT NULL);
INSERT INTO sequence (last, pipelines) VALUES (0, 0);

CREATE TABLE runs (
    n INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    definition_hash TEXT NOT NULL,
    created_at REAL NOT NULL,
    deadline REAL NOT NULL,
    timeout REAL NOT NULL,
    total INTEGER NOT NULL,
    version INTEGER NOT NULL,
    status TEXT NOT NULL,
    priority INTEGER NOT NULL,
    traceparent TEXT,
    ended_at REAL,
    due_at REAL,
    edition INTEGER NOT NULL,
    cancelled INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    late INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    timed_out INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    task_cancelled INTEGER NOT NULL,
    deliveries TEXT NOT NULL, -- JSON
    fingerprint TEXT NOT NULL,
    idempotency_key TEXT
);
CREATE UNIQUE INDEX runs_id ON runs (id);
CREATE UNIQUE INDEX runs_idempotency_key ON runs (idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX runs_due_at ON runs (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX runs_ended_at ON runs (ended_at) WHERE ended_at IS NOT NULL;
-- An index of a table with rowids ends in the rowid, `n`: these two list newest first without a sort.
CREATE INDEX runs_status ON runs (status);
CREATE INDEX runs_name ON runs (name);

-- Apart from `runs`, because that row is rewritten by every change and these never change.
CREATE TABLE inputs (
    n INTEGER PRIMARY KEY,
    definition BLOB NOT NULL,
    payload BLOB NOT NULL
);

CREATE TABLE tasks (
    n INTEGER NOT NULL,
    number INTEGER NOT NULL,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    last_attempt INTEGER NOT NULL,
    unsent INTEGER NOT NULL,
    due_at REAL,
    deadline REAL,
    result BLOB,
    cause TEXT,
    reason TEXT,
    mark INTEGER NOT NULL,
    percent REAL,
    note TEXT,
    sent_at REAL,
    ended_at REAL,
    dead_letter INTEGER NOT NULL,
    via TEXT, -- no index: it is asked for only when a broker is lost, and then of open runs, which `runs_status` finds
    step TEXT NOT NULL, -- the step's id, for people who look into the file
    PRIMARY KEY (n, number)
) WITHOUT ROWID;
CREATE INDEX tasks_due_at ON tasks (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX tasks_unsent ON tasks (n, number) WHERE unsent = 1;
CREATE INDEX tasks_dead_letter ON tasks (n, number) WHERE dead_letter = 1;

CREATE TABLE history (
    n INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    at REAL NOT NULL,
    what TEXT NOT NULL,
    task INTEGER,
    attempt INTEGER,
    detail TEXT,
    PRIMARY KEY (n, seq)
) WITHOUT ROWID;

CREATE TABLE pipelines (
    name TEXT PRIMARY KEY,
    definition BLOB NOT NULL,
    updated_at REAL NOT NULL
) WITHOUT ROWID;

-- The engines that use this file, and when each was last seen.
CREATE TABLE engines (
    name TEXT PRIMARY KEY,
    seen_at REAL NOT NULL
) WITHOUT ROWID;

-- The name of this installation, for what it shares with others.
CREATE TABLE installation (id TEXT NOT NULL);
INSERT INTO installation (id) VALUES (lower(hex(randomblob(16))));

-- What this installation remembers of things outside of this file.
CREATE TABLE facts (fact TEXT PRIMARY KEY) WITHOUT ROWID;
