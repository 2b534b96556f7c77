-- The statements of stores/sqlite. `VALUES /* rows */` stands for rows to write, and `/* values */` for values to look
-- up: see sqlite/bulk.py. `/* head */`, `/* task */` and `/* entry */` are the columns of a record: see records.py.

-- name: stored_runs
SELECT id, n, version, idempotency_key, fingerprint
FROM runs
WHERE id IN (/* values */);

-- name: used_keys
SELECT id, n, version, idempotency_key, fingerprint
FROM runs
WHERE idempotency_key IN (/* values */);

-- name: take_numbers
UPDATE sequence SET last = last + :count RETURNING last;

-- name: insert_runs
INSERT INTO runs (n, /* head */, fingerprint, idempotency_key)
VALUES /* rows */;

-- name: insert_inputs
INSERT INTO inputs (n, definition, payload)
VALUES /* rows */;

-- Both get whole heads, as `insert_runs` does, and write what can change.
-- name: update_head
UPDATE runs SET
    deadline = ?6,
    version = ?9,
    status = ?10,
    ended_at = ?13,
    due_at = ?14,
    edition = ?15,
    cancelled = ?16,
    entries = ?17,
    late = ?18,
    duplicates = ?19,
    succeeded = ?20,
    failed = ?21,
    timed_out = ?22,
    skipped = ?23,
    task_cancelled = ?24,
    deliveries = ?25
WHERE n = ?1;

-- name: update_heads
UPDATE runs SET
    deadline = new.column6,
    version = new.column9,
    status = new.column10,
    ended_at = new.column13,
    due_at = new.column14,
    edition = new.column15,
    cancelled = new.column16,
    entries = new.column17,
    late = new.column18,
    duplicates = new.column19,
    succeeded = new.column20,
    failed = new.column21,
    timed_out = new.column22,
    skipped = new.column23,
    task_cancelled = new.column24,
    deliveries = new.column25
FROM (VALUES /* rows */) AS new
WHERE runs.n = new.column1;

-- name: write_tasks
INSERT INTO tasks (n, /* task */, step)
VALUES /* rows */
ON CONFLICT (n, number) DO UPDATE SET
    status = excluded.status,
    attempt = excluded.attempt,
    last_attempt = excluded.last_attempt,
    unsent = excluded.unsent,
    due_at = excluded.due_at,
    deadline = excluded.deadline,
    result = excluded.result,
    cause = excluded.cause,
    reason = excluded.reason,
    mark = excluded.mark,
    percent = excluded.percent,
    note = excluded.note,
    sent_at = excluded.sent_at,
    ended_at = excluded.ended_at,
    dead_letter = excluded.dead_letter,
    via = excluded.via;

-- name: insert_history
INSERT INTO history (n, /* entry */)
VALUES /* rows */;

-- name: created_with
SELECT id FROM runs WHERE idempotency_key = :key AND fingerprint = :fingerprint;

-- name: load_runs
SELECT runs.n, definition, payload, /* head */
FROM runs
JOIN inputs ON inputs.n = runs.n
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: load_heads
SELECT /* head */
FROM runs
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: load_tasks
SELECT n, /* task */
FROM tasks
WHERE n IN (SELECT value FROM json_each(:numbers))
ORDER BY n, number;

-- name: load_task
SELECT /* task */
FROM tasks
WHERE n = (SELECT n FROM runs WHERE id = :id) AND number = :number;

-- name: due
SELECT due_at, n, NULL AS number, id FROM runs WHERE due_at <= :now
UNION ALL
SELECT tasks.due_at, tasks.n, number, id FROM tasks JOIN runs ON runs.n = tasks.n WHERE tasks.due_at <= :now
ORDER BY 1, 2, 3
LIMIT :limit;

-- name: next_due
SELECT min(due_at) FROM (
    SELECT min(due_at) AS due_at FROM runs WHERE due_at IS NOT NULL
    UNION ALL
    SELECT min(due_at) FROM tasks WHERE due_at IS NOT NULL
);

-- name: number_of_run
SELECT n FROM runs WHERE id = :id;

-- name: unsent
SELECT id, number, attempt
FROM tasks
JOIN runs ON runs.n = tasks.n
WHERE unsent = 1 AND (tasks.n, number) > (:n, :number)
ORDER BY tasks.n, number
LIMIT :limit;

-- name: brokers_in_use
SELECT DISTINCT via
FROM runs
JOIN tasks ON tasks.n = runs.n
WHERE runs.status = 'em_execucao' AND tasks.status = 'em_execucao' AND unsent = 0;

-- name: commands_with
SELECT DISTINCT runs.n, id
FROM runs
JOIN tasks ON tasks.n = runs.n
WHERE runs.status = 'em_execucao' AND tasks.status = 'em_execucao' AND unsent = 0 AND via IS :via AND runs.n > :n
ORDER BY runs.n
LIMIT :limit;

-- name: dead_letters_with
SELECT DISTINCT runs.n, id
FROM tasks
JOIN runs ON runs.n = tasks.n
WHERE dead_letter = 1 AND unsent = 0 AND via IS :via AND runs.n > :n
ORDER BY runs.n
LIMIT :limit;

-- name: forget_commands
UPDATE tasks SET unsent = 1
WHERE status = 'em_execucao' AND unsent = 0 AND n IN (SELECT n FROM runs WHERE status = 'em_execucao');

-- name: forget_dead_letters
UPDATE tasks SET unsent = 1
WHERE dead_letter = 1 AND unsent = 0;

-- name: list_runs
SELECT n, /* head */
FROM runs
WHERE n < :before /* filters */
ORDER BY n DESC
LIMIT :limit;

-- name: with_status
AND status = :status

-- name: with_name
AND name = :name

-- name: created_since
AND created_at >= :since

-- name: created_until
AND created_at < :until

-- LIKE ignores the case of ASCII letters only. `folded` is Python's and slower, so it is used for ids with other letters,
-- which have more bytes than characters, and once for each name, found by walking the index of names.
-- name: with_text
AND (
    id LIKE :text ESCAPE '\'
    OR (length(CAST(id AS BLOB)) > length(id) AND folded(id) LIKE :text ESCAPE '\')
    OR name IN (
        WITH RECURSIVE names (name) AS (
            SELECT min(name) FROM runs
            UNION ALL
            SELECT (SELECT min(name) FROM runs WHERE name > names.name) FROM names WHERE name IS NOT NULL
        )
        SELECT name FROM names WHERE folded(coalesce(name, '')) LIKE :text ESCAPE '\'
    )
)

-- name: history
SELECT /* entry */
FROM history
WHERE n = (SELECT n FROM runs WHERE id = :id) AND seq > :after
ORDER BY seq
LIMIT :limit;

-- name: census
SELECT status, count(*) FROM runs GROUP BY status;

-- An unsent dead letter is something left to deliver.
-- name: prunable
SELECT n, total FROM runs
WHERE ended_at < :ended_before AND due_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.n = runs.n AND unsent = 1)
ORDER BY ended_at
LIMIT :limit;

-- A run may have been reopened since it was found.
-- name: still_prunable
SELECT n FROM runs
WHERE n IN (SELECT value FROM json_each(:numbers)) AND ended_at < :ended_before AND due_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.n = runs.n AND unsent = 1);

-- name: delete_history
DELETE FROM history WHERE n IN (SELECT value FROM json_each(:numbers));

-- name: delete_tasks
DELETE FROM tasks WHERE n IN (SELECT value FROM json_each(:numbers));

-- name: delete_inputs
DELETE FROM inputs WHERE n IN (SELECT value FROM json_each(:numbers));

-- name: delete_runs
DELETE FROM runs WHERE n IN (SELECT value FROM json_each(:numbers));

-- name: pipelines
SELECT name, definition FROM pipelines ORDER BY name;

-- name: put_pipeline
INSERT INTO pipelines (name, definition, updated_at) VALUES (:name, :definition, :now)
ON CONFLICT (name) DO UPDATE SET definition = excluded.definition, updated_at = excluded.updated_at;

-- name: delete_pipeline
DELETE FROM pipelines WHERE name = :name;

-- name: mark_pipelines
UPDATE sequence SET pipelines = pipelines + 1;

-- name: pipelines_mark
SELECT pipelines FROM sequence;

-- name: note_engine
INSERT INTO engines (name, seen_at) VALUES (:name, :now)
ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at;

-- name: forget_engines
DELETE FROM engines WHERE seen_at < :before OR seen_at > :after OR name = :name;

-- name: engines
SELECT name FROM engines WHERE seen_at >= :since ORDER BY name;

-- name: installation
SELECT id FROM installation;

-- name: note
INSERT INTO facts (fact) VALUES (:fact) ON CONFLICT DO NOTHING;

-- name: noted
SELECT 1 FROM facts WHERE fact = :fact;

-- name: prove_write
UPDATE sequence SET last = last;
