-- The engines that use this file, and when each was last seen.
CREATE TABLE engines (
    name TEXT PRIMARY KEY,
    seen_at REAL NOT NULL
) WITHOUT ROWID;

-- Another number whenever a pipeline is put or deleted.
ALTER TABLE sequence ADD COLUMN pipelines INTEGER NOT NULL DEFAULT 0;
