-- The whole of Relay's record. Everything lives in the schema `relay`, so that a database can be shared.
-- Smallint codes are the members of the enums in relay/core/model.py.

create table relay.schema_info (
    only_row boolean primary key default true check (only_row),
    -- The schema's own number: a release refuses to run below the one it was written for.
    version integer not null,
    -- The lowest such number whose release may still run here; raised only by a contracting migration.
    oldest_supported integer not null
);
insert into relay.schema_info (version, oldest_supported) values (1, 1);

-- RFC 9562 version 7, for rows whose number is known only inside a statement: 48 bits of Unix milliseconds before
-- random ones, so that new rows go to the right edge of an index. (Postgres has uuidv7() of its own from 18 on.)
create function relay.uuid7() returns uuid language sql volatile parallel safe as $$
    select encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

create table relay.workspaces (
    id uuid primary key,
    name text not null unique,
    max_endpoints integer,
    ingest_rate double precision,
    max_payload_bytes integer,
    -- Signs jobs; sealed (see relay/store/vault.py), as every secret here is.
    job_secret bytea,
    job_previous_secret bytea,
    job_previous_secret_expires_at timestamptz,
    created_at timestamptz not null default now()
);

create table relay.ingest_buckets (
    workspace_id uuid primary key references relay.workspaces on delete cascade,
    tokens double precision not null,
    refilled_at timestamptz not null
) with (fillfactor = 50);

create table relay.api_keys (
    id uuid primary key,
    workspace_id uuid not null references relay.workspaces,
    name text not null,
    -- The key's public part, by which it is found; the digest of the whole decides.
    lookup text not null unique,
    digest bytea not null,
    scopes text[] not null,
    created_at timestamptz not null default now(),
    last_used_at timestamptz,
    revoked_at timestamptz
);
create index api_keys_by_workspace on relay.api_keys (workspace_id, created_at, id);

create table relay.event_types (
    workspace_id uuid not null references relay.workspaces,
    name text not null,
    description text not null default '',
    json_schema jsonb,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    primary key (workspace_id, name)
);

create table relay.endpoints (
    id uuid primary key,
    workspace_id uuid not null references relay.workspaces,
    -- 0: made by its owner; 1: implicit, one for each origin that jobs are sent to.
    kind smallint not null default 0,
    origin text,
    transport text not null default 'http',
    url text not null,
    description text not null default '',
    event_types text[] not null default '{}',
    signing text not null default 'relay',
    -- Name to sealed value (base64): names can be listed without a master key.
    headers jsonb not null default '{}',
    certificate text,
    certificate_key bytea,
    secret bytea,
    previous_secret bytea,
    previous_secret_expires_at timestamptz,
    rate_per_second double precision not null default 10,
    burst integer not null default 20,
    max_in_flight integer,
    timeout_ms integer,
    retry jsonb not null default '{}',
    metadata jsonb not null default '{}',
    enabled boolean not null default true,
    disabled_at timestamptz,
    disabled_reason text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    deleted_at timestamptz,
    -- Raised by the trigger below: workers keep what they built from a row until this moves.
    version integer not null default 1,

    -- What deliveries move. A success on a healthy endpoint writes none of it.
    breaker_state smallint not null default 0,
    breaker_failures integer not null default 0,
    breaker_trips integer not null default 0,
    breaker_generation bigint not null default 0,
    breaker_open_until timestamptz,
    probe_delivery_id uuid,
    probe_deadline timestamptz,
    held_until timestamptz,
    failing_since timestamptz,
    failing_attempts integer not null default 0
) with (fillfactor = 70);
create index endpoints_by_workspace on relay.endpoints (workspace_id, created_at, id) where deleted_at is null;
create unique index endpoints_by_origin on relay.endpoints (workspace_id, origin) where kind = 1;

create function relay.raise_endpoint_version() returns trigger language plpgsql as $$
begin
    new.version := old.version + 1;
    return new;
end
$$;
-- By column list, so that a breaker or hold write does not throw away what workers have built.
create trigger endpoint_version before update of
    transport, url, signing, headers, certificate, certificate_key, secret, previous_secret,
    previous_secret_expires_at, rate_per_second, burst, max_in_flight, timeout_ms, retry, deleted_at
    on relay.endpoints for each row execute function relay.raise_endpoint_version();

-- A narrow table of its own: the endpoint's row would serialise the workers' claims.
create table relay.endpoint_buckets (
    endpoint_id uuid primary key references relay.endpoints on delete cascade,
    tokens double precision not null,
    refilled_at timestamptz not null,
    slots_until timestamptz
) with (fillfactor = 50);

create table relay.endpoint_minutes (
    endpoint_id uuid not null references relay.endpoints on delete cascade,
    minute timestamptz not null,
    successes integer not null default 0,
    retryable_failures integer not null default 0,
    permanent_failures integer not null default 0,
    deferrals integer not null default 0,
    last_success_at timestamptz,
    last_failure_at timestamptz,
    primary key (endpoint_id, minute)
);

create table relay.breaker_changes (
    endpoint_id uuid not null references relay.endpoints on delete cascade,
    at timestamptz not null default clock_timestamp(),
    generation bigint not null,
    state smallint not null,
    open_until timestamptz,
    primary key (endpoint_id, generation)
);

create table relay.events (
    id uuid primary key,
    workspace_id uuid not null references relay.workspaces,
    type text not null,
    -- 0: a producer's; 1: a job's; 2: Relay's own; 3: a test's.
    source smallint not null default 0,
    content_type text not null,
    -- The exact bytes received: never parsed again, never re-encoded.
    payload bytea not null,
    api_key_id uuid,
    request_id text,
    idempotency_key text,
    -- What it fanned out to. In place of an index on deliveries by event, whose entry each of a delivery's four
    -- writes would rewrite.
    delivery_ids uuid[] not null default '{}',
    created_at timestamptz not null default now()
);
create index events_by_workspace on relay.events (workspace_id, created_at, id);

create table relay.idempotency_keys (
    workspace_id uuid not null,
    key text not null,
    fingerprint bytea not null,
    event_id uuid not null,
    response bytea not null,
    created_at timestamptz not null default now(),
    primary key (workspace_id, key)
);
create index idempotency_keys_by_age on relay.idempotency_keys (created_at);

create table relay.deliveries (
    id uuid primary key,
    workspace_id uuid not null,
    -- No foreign key: both are written by one statement, and to check a delete would take an index by event.
    event_id uuid not null,
    endpoint_id uuid not null references relay.endpoints,
    event_type text not null,
    status smallint not null default 0,
    reason text,
    -- Over its whole life; the budget of this generation counts from budget_from.
    attempt_count integer not null default 0,
    budget_from integer not null default 0,
    generation integer not null default 0,
    -- Null while paused: neither due nor late.
    due_at timestamptz default now(),
    announced_at timestamptz,
    lease_token uuid,
    lease_until timestamptz,
    expires_at timestamptz,
    deferred_reason text,
    deferred_since timestamptz,
    deferred_count integer not null default 0,
    -- The last attempt's evidence, once dead: it outlives the log's window.
    last_attempt jsonb,
    created_at timestamptz not null default now(),
    finished_at timestamptz
) with (
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000
);
-- Announcing, claiming and recording rewrite a row's entry in each index that holds it, so there are few.
-- The publisher's scan. With the id, so that it can go on where a full batch ended: many rows share a due time.
create index deliveries_unannounced on relay.deliveries (due_at, id) where status = 0 and announced_at is null;
-- The reconciler's scan, and the workers' own look while Redis is away.
create index deliveries_announced on relay.deliveries (announced_at) where status = 0 and announced_at is not null;
-- The reaper's.
create index deliveries_leased on relay.deliveries (lease_until) where status = 1;
-- An endpoint's pages, newest first.
create index deliveries_by_endpoint on relay.deliveries (endpoint_id, created_at, id);

create table relay.jobs (
    delivery_id uuid primary key references relay.deliveries on delete cascade,
    url text not null,
    headers jsonb not null,
    headers_sealed boolean not null,
    signing text not null,
    max_attempts integer not null,
    timeout_ms integer
);

create table relay.delivery_attempts (
    delivery_id uuid not null,
    -- When it was claimed, by the database's clock.
    at timestamptz not null,
    -- The lease under which it was made: with the two above it tells one attempt from another.
    lease_token uuid not null,
    -- Null for a deferral, which spends no attempt.
    number integer,
    generation integer not null,
    class smallint not null,
    code text,
    error text,
    status integer,
    body_incomplete boolean not null default false,
    sends smallint not null default 0,
    dns_us integer,
    connect_us integer,
    tls_us integer,
    first_byte_us integer,
    total_us integer,
    bytes_sent integer,
    bytes_received integer,
    remote_address text,
    worker text,
    reply_headers text,
    snippet text,
    primary key (delivery_id, at, lease_token)
) partition by range (at);
create table relay.delivery_attempts_default partition of relay.delivery_attempts default;
do $$
declare
    day date := (now() at time zone 'UTC')::date;
begin
    for ahead in 0..14 loop
        execute format(
            'create table relay.delivery_attempts_%s partition of relay.delivery_attempts for values from (%L) to (%L)',
            to_char(day + ahead, 'YYYYMMDD'), (day + ahead) || ' 00:00:00+00', (day + ahead + 1) || ' 00:00:00+00'
        );
    end loop;
end
$$;

create table relay.replays (
    id uuid primary key,
    workspace_id uuid not null references relay.workspaces,
    endpoint_id uuid not null references relay.endpoints,
    filters jsonb not null,
    state text not null default 'waiting',
    -- The walk's position, so that another worker can go on where one died.
    after_created_at timestamptz,
    after_id uuid,
    matched integer not null default 0,
    replayed integer not null default 0,
    skipped integer not null default 0,
    lease_until timestamptz,
    created_at timestamptz not null default now(),
    finished_at timestamptz
);
create index replays_unfinished on relay.replays (created_at) where finished_at is null;

create table relay.audit_log (
    id uuid primary key,
    -- Null for what concerns the instance.
    workspace_id uuid,
    at timestamptz not null default now(),
    actor text not null,
    action text not null,
    target text not null,
    before jsonb,
    after jsonb,
    request_id text
);
create index audit_log_by_workspace on relay.audit_log (workspace_id, at, id);

create table relay.heartbeats (
    process_id uuid primary key,
    role text not null,
    host text not null,
    pid integer not null,
    release text not null,
    started_at timestamptz not null default now(),
    beat_at timestamptz not null default now(),
    details jsonb not null default '{}'
) with (fillfactor = 50);

create table relay.sweeps (
    name text primary key,
    started_at timestamptz not null,
    finished_at timestamptz,
    counts jsonb
) with (fillfactor = 50);
