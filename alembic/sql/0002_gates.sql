-- What the gates need: buckets that a crash empties instead of filling, requests to bring rows forward, and indexes
-- for an endpoint's waiting rows and for dead letters, both outside the way of a delivery that just arrives.

-- Unlogged: taking tokens waits for no disk. A crash empties the table, so a row that is missing is an empty bucket.
drop table relay.endpoint_buckets;
create unlogged table relay.endpoint_buckets (
    endpoint_id uuid primary key references relay.endpoints on delete cascade,
    tokens double precision not null,
    refilled_at timestamptz not null,
    -- The last time to come back that was given to a row without a token; rows queue while it is ahead.
    slots_until timestamptz,
    -- The breaker's generation that these times were counted in: each trip counts anew.
    slots_generation bigint not null default 0
) with (fillfactor = 50);
insert into relay.endpoint_buckets (endpoint_id, tokens, refilled_at) select id, burst, now() from relay.endpoints;

-- A new endpoint begins with a full bucket, whoever makes it.
create function relay.fill_new_bucket() returns trigger language plpgsql as $$
begin
    insert into relay.endpoint_buckets (endpoint_id, tokens, refilled_at) values (new.id, new.burst, now());
    return null;
end
$$;
create trigger endpoint_bucket after insert on relay.endpoints
    for each row execute function relay.fill_new_bucket();

-- Endpoints whose waiting rows are to be moved: asked for in the transaction of what makes it due, done by a sweep.
create table relay.wakes (
    endpoint_id uuid primary key references relay.endpoints on delete cascade,
    -- Also rows that wait for their own next try, and not only those that were held back.
    retries_too boolean not null default false,
    -- End the rows instead (model.Status): 3 of a deleted endpoint, 4 where their owner called them off.
    ends_as smallint,
    asked_at timestamptz not null default now()
);

-- An endpoint's rows that wait for something. A delivery that goes out at once never enters it.
create index deliveries_waiting on relay.deliveries (endpoint_id, due_at, id)
    where status = 0 and (attempt_count > 0 or deferred_reason is not null);
-- Dead letters, by workspace and by endpoint, newest first.
create index deliveries_dead on relay.deliveries (workspace_id, created_at, id) where status = 3;
create index deliveries_dead_by_endpoint on relay.deliveries (endpoint_id, created_at, id) where status = 3;

-- The public halves of a `standard-ed25519` endpoint's keys, so that showing them takes no master key.
alter table relay.endpoints add public_key bytea, add previous_public_key bytea;

-- Unlogged: an event of a workspace with a rate waits for the disk once, not twice. A missing row is a full bucket.
alter table relay.ingest_buckets set unlogged;

-- Raised by every change of a workspace's event types: processes keep compiled schemas until it moves, and look for
-- none while it is 0.
alter table relay.workspaces add event_types_version integer not null default 0;

-- When the next row that a replay takes may be due: its rows come back one after the other, at the endpoint's rate.
alter table relay.replays add paced_until timestamptz;

-- The context of the trace that an event belongs to (W3C); null unless RELAY_TRACING is on.
alter table relay.events add traceparent text;

update relay.schema_info set version = 2;
