-- A commit is one call: `oraculo_write_rows(oraculo_write_heads(…), …)`, one round trip and one transaction.
--
-- The types are what a program sends. They are not the rows of the tables, so that a program that was started before a
-- later migration adds a column still sends what its functions take.

-- A run: its head as in records.py, and behind it what only a new run has.
CREATE TYPE oraculo_run_record AS (
    place integer, -- of the run in this commit, from 1
    id text,
    name text,
    definition_hash text,
    created_at double precision,
    deadline double precision,
    timeout double precision,
    total bigint,
    version bigint, -- the new one: it is written over the one before it, and over no other
    status text,
    priority integer,
    traceparent text,
    ended_at double precision,
    due_at double precision,
    edition integer,
    cancelled boolean,
    entries bigint,
    late bigint,
    duplicates bigint,
    succeeded bigint,
    failed bigint,
    timed_out bigint,
    skipped bigint,
    task_cancelled bigint,
    deliveries json,
    search text,
    fingerprint text,
    idempotency_key text,
    definition bytea,
    payload bytea
);

CREATE TYPE oraculo_task_record AS (
    place integer,
    number integer,
    status text,
    attempt integer,
    last_attempt integer,
    unsent boolean,
    due_at double precision,
    deadline double precision,
    result bytea,
    cause text,
    reason text,
    mark bigint,
    percent double precision,
    note text,
    sent_at double precision,
    ended_at double precision,
    dead_letter boolean,
    via text,
    step text
);

CREATE TYPE oraculo_entry_record AS (
    place integer,
    seq bigint,
    at double precision,
    what text,
    task integer,
    attempt integer,
    detail text
);

-- Writes what may be written, and returns the number of each run, by place: 0 where a creation found its id or its key
-- in use, or a change found another version than the one it was decided on.
--
-- Heads come sorted by id and are found one after the other, so that two commits lock shared runs in one order.
CREATE FUNCTION oraculo_write_heads(creations oraculo_run_record[], heads oraculo_run_record[])
RETURNS bigint[]
LANGUAGE plpgsql
-- A plan that was made while the tables were small must do when they are large.
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    numbers bigint[];
    created bigint;
    written record;
BEGIN
    numbers := ARRAY(SELECT nextval('oraculo_runs_n_seq') FROM unnest(creations));
    IF cardinality(creations) > 0 THEN
        INSERT INTO oraculo_runs (
            n, id, name, search, definition_hash, created_at, timeout, total, priority, traceparent, fingerprint,
            idempotency_key, status, ended_at, due_at, version, deadline, edition, cancelled, entries, late, duplicates,
            succeeded, failed, timed_out, skipped, task_cancelled, deliveries
        )
        SELECT
            numbers[place], id, name, search, definition_hash, created_at, timeout, total, priority, traceparent,
            fingerprint, idempotency_key, status, ended_at, due_at, version, deadline, edition, cancelled, entries,
            late, duplicates, succeeded, failed, timed_out, skipped, task_cancelled, deliveries
        FROM unnest(creations)
        ON CONFLICT DO NOTHING;

        GET DIAGNOSTICS created = ROW_COUNT;
        IF created < cardinality(creations) THEN
            numbers := ARRAY(
                SELECT CASE WHEN EXISTS (SELECT FROM oraculo_runs WHERE n = number) THEN number ELSE 0 END
                FROM unnest(numbers) WITH ORDINALITY AS taken (number, place)
                ORDER BY place
            );
        END IF;

        INSERT INTO oraculo_inputs (n, definition, payload)
        SELECT numbers[place], definition, payload
        FROM unnest(creations)
        WHERE numbers[place] > 0;
    END IF;

    IF cardinality(heads) > 0 THEN
        numbers := numbers || array_fill(0::bigint, ARRAY[cardinality(heads)]);
        FOR written IN
            UPDATE oraculo_runs AS old SET
                status = new.status,
                ended_at = new.ended_at,
                due_at = new.due_at,
                version = new.version,
                deadline = new.deadline,
                edition = new.edition,
                cancelled = new.cancelled,
                entries = new.entries,
                late = new.late,
                duplicates = new.duplicates,
                succeeded = new.succeeded,
                failed = new.failed,
                timed_out = new.timed_out,
                skipped = new.skipped,
                task_cancelled = new.task_cancelled,
                deliveries = new.deliveries
            FROM unnest(heads) AS new
            WHERE old.id = new.id AND old.version = new.version - 1
            RETURNING old.n, new.place
        LOOP
            numbers[written.place] := written.n;
        END LOOP;
    END IF;
    RETURN numbers;
END
$$;

-- Writes the tasks and the history of the runs whose number is not 0, and returns the numbers.
CREATE FUNCTION oraculo_write_rows(
    numbers bigint[], created oraculo_task_record[], changed oraculo_task_record[], entries oraculo_entry_record[]
)
RETURNS bigint[]
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
BEGIN
    IF cardinality(created) > 0 THEN
        INSERT INTO oraculo_tasks (
            n, number, status, attempt, last_attempt, unsent, due_at, deadline, result, cause, reason, mark,
            percent, note, sent_at, ended_at, dead_letter, via, step
        )
        SELECT
            numbers[place], number, status, attempt, last_attempt, unsent, due_at, deadline, result, cause,
            reason, mark, percent, note, sent_at, ended_at, dead_letter, via, step
        FROM unnest(created)
        WHERE numbers[place] > 0;
    END IF;

    IF cardinality(changed) > 0 THEN
        UPDATE oraculo_tasks AS old SET
            status = new.status,
            attempt = new.attempt,
            last_attempt = new.last_attempt,
            unsent = new.unsent,
            due_at = new.due_at,
            deadline = new.deadline,
            result = new.result,
            cause = new.cause,
            reason = new.reason,
            mark = new.mark,
            percent = new.percent,
            note = new.note,
            sent_at = new.sent_at,
            ended_at = new.ended_at,
            dead_letter = new.dead_letter,
            via = new.via
        FROM unnest(changed) AS new
        WHERE old.n = numbers[new.place] AND old.number = new.number;
    END IF;

    INSERT INTO oraculo_history (n, seq, at, what, task, attempt, detail)
    SELECT numbers[place], seq, at, what, task, attempt, detail
    FROM unnest(entries)
    WHERE numbers[place] > 0;
    RETURN numbers;
END
$$;

-- Deletes those of the runs that may still be deleted, and returns how many. They are locked first and looked at
-- after: a run may have been opened again, or have something to deliver again, since it was found.
CREATE FUNCTION oraculo_prune(numbers bigint[], ended_before double precision)
RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    locked bigint[];
    gone bigint[];
BEGIN
    locked := ARRAY(
        SELECT n FROM oraculo_runs WHERE n = ANY (numbers) AND ended_at < ended_before AND due_at IS NULL
        FOR UPDATE SKIP LOCKED
    );
    gone := ARRAY(
        SELECT number FROM unnest(locked) AS run (number)
        WHERE (SELECT count(*) FROM oraculo_tasks WHERE n = run.number AND unsent) = 0
    );
    DELETE FROM oraculo_history WHERE n = ANY (gone);
    DELETE FROM oraculo_tasks WHERE n = ANY (gone);
    DELETE FROM oraculo_inputs WHERE n = ANY (gone);
    DELETE FROM oraculo_runs WHERE n = ANY (gone);
    RETURN cardinality(gone);
END
$$;
