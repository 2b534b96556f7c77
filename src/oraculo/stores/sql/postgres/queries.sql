-- The statements of stores/postgres/. What a commit writes is in the functions of migrations/0002_commit.sql.
-- `/* head */`, `/* task */` and `/* entry */` are the columns of a record: see records.py.

-- -- opening --------------------------------------------------------------------------------------------------------

-- Run on every connection. Compiling a statement costs more than running any of these.
-- name: session
SET jit = off;
SET default_transaction_isolation = 'read committed';
-- A confirmed commit must be on the disk, whatever the role or database has set.
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
-- Since PostgreSQL 17. Each statement has its limit, and a commit of a wide run may take many statements.
SELECT set_config('transaction_timeout', '0', false) WHERE current_setting('transaction_timeout', true) IS NOT NULL;

-- For the engine's reads, which all have an index: a plan that was made for small tables must also fit large ones.
-- name: reader_session
SET enable_seqscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;

-- Lifts the server's time limits for this transaction.
-- name: without_time_limit
SET LOCAL statement_timeout = 0;

-- name: has_schema
SELECT to_regclass('oraculo_migrations') IS NOT NULL;

-- name: schema
SELECT coalesce(max(number), 0) FROM oraculo_migrations;

-- Held until the transaction ends, so that only one of several starting programs creates the tables.
-- name: lock_schema
SELECT pg_advisory_xact_lock(7824391155012);

-- The schema with our tables. Another schema that now precedes it in the path must not get a second, empty set.
-- name: stay_in_schema
SELECT set_config('search_path', quote_ident(nspname) || ', ' || current_setting('search_path'), true)
FROM pg_class
JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE pg_class.oid = to_regclass('oraculo_migrations');

-- For each schema: does it exist, may the user use it, and does it hold our tables?
-- name: schemas_in_path
SELECT name, schemas.oid IS NOT NULL, coalesce(has_schema_privilege(schemas.oid, 'USAGE'), false), EXISTS (
    SELECT FROM pg_class WHERE relnamespace = schemas.oid AND relname = 'oraculo_migrations'
)
FROM regexp_split_to_table(current_setting('search_path'), ' *, *') WITH ORDINALITY AS path (word, place)
CROSS JOIN replace(CASE WHEN word LIKE '"%' THEN btrim(word, '"') ELSE lower(word) END, '$user', current_user) AS name
LEFT JOIN pg_namespace AS schemas ON nspname = name
ORDER BY place;

-- name: make_migrations
CREATE TABLE IF NOT EXISTS oraculo_migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- name: note_migration
INSERT INTO oraculo_migrations (number, name) VALUES ($1, $2);

-- An empty commit, because a user who may write the tables may still lack the right to call functions.
-- name: prove_write
WITH written AS (
    UPDATE oraculo_marks SET pipelines = pipelines
)
SELECT oraculo_write_rows(oraculo_write_heads('{}', '{}'), '{}', '{}', '{}');

-- The rights that the user lacks on our tables, on the sequence of run numbers, and on the functions.
-- name: missing_rights
SELECT relname, string_agg(wanted, ', ' ORDER BY place)
FROM pg_class, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'USAGE']) WITH ORDINALITY AS rights (wanted, place)
WHERE relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'oraculo_migrations'::regclass)
    AND relname IN (
        'oraculo_migrations', 'oraculo_runs', 'oraculo_runs_n_seq', 'oraculo_inputs', 'oraculo_tasks',
        'oraculo_history', 'oraculo_pipelines', 'oraculo_marks', 'oraculo_engines', 'oraculo_installation',
        'oraculo_facts'
    )
    AND CASE
        WHEN relkind = 'S' THEN wanted = 'USAGE' AND NOT has_sequence_privilege(oid, wanted)
        WHEN relkind <> 'r' OR wanted = 'USAGE' THEN false
        WHEN relname = 'oraculo_migrations' AND wanted <> 'SELECT' THEN false
        ELSE NOT has_table_privilege(oid, wanted)
    END
GROUP BY relname
UNION ALL
SELECT proname, 'EXECUTE'
FROM pg_proc
WHERE pronamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'oraculo_migrations'::regclass)
    AND proname IN ('oraculo_write_heads', 'oraculo_write_rows', 'oraculo_prune')
    AND NOT has_function_privilege(oid, 'EXECUTE')
ORDER BY 1;

-- -- commits --------------------------------------------------------------------------------------------------------

-- name: commit
SELECT oraculo_write_rows(oraculo_write_heads($1, $2), $3, $4, $5);

-- name: write_heads
SELECT oraculo_write_heads($1, $2);

-- name: write_rows
SELECT oraculo_write_rows($1, $2, $3, $4);

-- name: in_the_way
SELECT id, idempotency_key, fingerprint FROM oraculo_runs WHERE id = ANY ($1::text[])
UNION
SELECT id, idempotency_key, fingerprint FROM oraculo_runs WHERE idempotency_key = ANY ($2::text[]);

-- -- reads of the engine --------------------------------------------------------------------------------------------

-- name: created_with
SELECT id FROM oraculo_runs WHERE idempotency_key = $1 AND fingerprint = $2;

-- One statement, so that a run and its tasks fit together. The run is in the row of its first task.
-- name: load
SELECT tasks.n, run.definition, run.payload, /* run.head */, /* tasks.task */
FROM oraculo_runs AS runs
JOIN oraculo_tasks AS tasks ON tasks.n = runs.n
LEFT JOIN LATERAL (
    SELECT runs.*, definition, payload FROM oraculo_inputs WHERE n = tasks.n AND tasks.number = 0
) AS run ON true
WHERE runs.id = ANY ($1::text[]);

-- name: load_task
SELECT /* task */
FROM oraculo_tasks
WHERE n = (SELECT n FROM oraculo_runs WHERE id = $1) AND number = $2;

-- name: load_heads
SELECT /* head */
FROM oraculo_runs
WHERE id = ANY ($1::text[]);

-- name: due
SELECT id, number
FROM (
    (
        SELECT due_at, n, NULL::integer AS number
        FROM oraculo_runs WHERE due_at <= $1
        ORDER BY due_at, n LIMIT $2
    )
    UNION ALL
    (
        SELECT due_at, n, number
        FROM oraculo_tasks WHERE due_at <= $1
        ORDER BY due_at, n, number LIMIT $2
    )
    ORDER BY due_at, n, number LIMIT $2
) AS timers
JOIN oraculo_runs AS runs ON runs.n = timers.n
ORDER BY timers.due_at, timers.n, timers.number;

-- name: next_due
SELECT least(
    (SELECT min(due_at) FROM oraculo_runs WHERE due_at IS NOT NULL),
    (SELECT min(due_at) FROM oraculo_tasks WHERE due_at IS NOT NULL)
);

-- The run to start after may have been pruned: begin again rather than leave something out.
-- name: unsent
SELECT id, number, attempt
FROM oraculo_tasks AS tasks
JOIN oraculo_runs AS runs ON runs.n = tasks.n
WHERE unsent AND (tasks.n, number) > (coalesce((SELECT n FROM oraculo_runs WHERE id = $1), 0), $2::integer)
ORDER BY tasks.n, number
LIMIT $3;

-- name: brokers_in_use
SELECT DISTINCT via
FROM oraculo_runs AS runs
JOIN oraculo_tasks AS tasks ON tasks.n = runs.n
WHERE runs.status = 'em_execucao' AND tasks.status = 'em_execucao' AND NOT unsent;

-- name: commands_with
SELECT id
FROM oraculo_runs AS runs
WHERE status = 'em_execucao'
    AND n > coalesce((SELECT n FROM oraculo_runs WHERE id = $2), 0)
    AND EXISTS (
        SELECT FROM oraculo_tasks AS tasks
        WHERE tasks.n = runs.n AND tasks.status = 'em_execucao' AND NOT unsent AND via IS NOT DISTINCT FROM $1::text
    )
ORDER BY n
LIMIT $3;

-- name: dead_letters_with
SELECT id
FROM (
    SELECT DISTINCT n
    FROM oraculo_tasks
    WHERE dead_letter AND NOT unsent AND via IS NOT DISTINCT FROM $1::text
        AND n > coalesce((SELECT n FROM oraculo_runs WHERE id = $2), 0)
    ORDER BY n
    LIMIT $3
) AS holders
JOIN oraculo_runs AS runs ON runs.n = holders.n
ORDER BY holders.n;

-- name: forget_commands
UPDATE oraculo_tasks AS tasks SET unsent = true
FROM oraculo_runs AS runs
WHERE runs.status = 'em_execucao' AND tasks.n = runs.n AND tasks.status = 'em_execucao' AND NOT unsent;

-- name: forget_dead_letters
UPDATE oraculo_tasks SET unsent = true
WHERE dead_letter AND NOT unsent;

-- Rows that another engine is deleting or writing now are skipped. A record from the future was written before the
-- clock was set back.
-- name: attend
WITH noted AS (
    INSERT INTO oraculo_engines (name, seen_at) VALUES ($1, $2)
    ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at
), silent AS (
    SELECT name FROM oraculo_engines WHERE name <> $1 AND abs(seen_at - $2) > $3::double precision
    FOR UPDATE SKIP LOCKED
), forgotten AS (
    DELETE FROM oraculo_engines WHERE name IN (SELECT name FROM silent)
)
SELECT name FROM oraculo_engines WHERE name <> $1 AND abs(seen_at - $2) <= $3::double precision
UNION ALL
SELECT $1
ORDER BY name;

-- name: depart
DELETE FROM oraculo_engines WHERE name = $1;

-- name: engines
SELECT name FROM oraculo_engines WHERE seen_at >= $1 ORDER BY name;

-- name: clock
SELECT extract(EPOCH FROM clock_timestamp())::double precision;

-- name: installation
SELECT id FROM oraculo_installation;

-- name: note
INSERT INTO oraculo_facts (fact) VALUES ($1) ON CONFLICT DO NOTHING;

-- name: noted
SELECT 1 FROM oraculo_facts WHERE fact = $1;

-- -- reads for people -----------------------------------------------------------------------------------------------

-- name: list_runs
SELECT n, /* head */
FROM oraculo_runs
WHERE n < $1 /* filters */
ORDER BY n DESC
LIMIT $2;

-- `$?` is the next parameter.
-- name: with_status
AND status = $?

-- name: with_name
AND name = $?

-- name: with_text
AND strpos(search, $?) > 0

-- name: created_since
AND created_at >= $?

-- name: created_until
AND created_at < $?

-- name: history
SELECT /* entry */
FROM oraculo_history
WHERE n = (SELECT n FROM oraculo_runs WHERE id = $1) AND seq > $2
ORDER BY seq
LIMIT $3;

-- name: census
SELECT status, count(*) FROM oraculo_runs GROUP BY status;

-- -- retention and pipelines ----------------------------------------------------------------------------------------

-- An unsent dead letter is something left to deliver. It is counted for each run by itself, because many unsent
-- commands could make a join slow.
-- name: prunable
SELECT n, total
FROM oraculo_runs AS runs
WHERE ended_at < $1 AND due_at IS NULL
    AND (SELECT count(*) FROM oraculo_tasks AS tasks WHERE tasks.n = runs.n AND unsent) = 0
ORDER BY ended_at
LIMIT $2;

-- name: prune
SELECT oraculo_prune($1, $2);

-- name: pipelines
SELECT name, definition FROM oraculo_pipelines ORDER BY name;

-- name: pipelines_mark
SELECT pipelines FROM oraculo_marks;

-- name: put_pipeline
WITH marked AS (
    UPDATE oraculo_marks SET pipelines = pipelines + 1
)
INSERT INTO oraculo_pipelines (name, definition, updated_at) VALUES ($1, $2, $3)
ON CONFLICT (name) DO UPDATE SET definition = excluded.definition, updated_at = excluded.updated_at;

-- name: delete_pipeline
WITH deleted AS (
    DELETE FROM oraculo_pipelines WHERE name = $1 RETURNING name
), marked AS (
    UPDATE oraculo_marks SET pipelines = pipelines + 1 WHERE EXISTS (SELECT FROM deleted)
)
SELECT count(*) > 0 FROM deleted;
