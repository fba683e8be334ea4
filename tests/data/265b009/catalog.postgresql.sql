CREATE FUNCTION public.audit_is_final() RETURNS trigger
    LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'entries of the audit log are never changed'; END $$;
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.aliases (
    policy character varying NOT NULL,
    alias character varying NOT NULL,
    version character varying,
    digest character varying,
    at double precision NOT NULL
);
CREATE TABLE public.audit (
    id integer NOT NULL,
    at double precision NOT NULL,
    actor character varying NOT NULL,
    on_behalf_of character varying,
    action character varying NOT NULL,
    subject character varying NOT NULL,
    before character varying NOT NULL,
    after character varying NOT NULL,
    hash character varying NOT NULL
);
CREATE TABLE public.bases (
    digest character varying NOT NULL,
    name character varying NOT NULL,
    path character varying NOT NULL,
    created_at double precision NOT NULL
);
CREATE TABLE public.budgets (
    subject character varying NOT NULL,
    period character varying NOT NULL,
    drawn bigint NOT NULL
);
CREATE TABLE public.catalog (
    id character varying NOT NULL,
    secret character varying DEFAULT ''::character varying NOT NULL
);
CREATE TABLE public.changes (
    id integer NOT NULL,
    policy character varying
);
CREATE SEQUENCE public.changes_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.changes_id_seq OWNED BY public.changes.id;
CREATE TABLE public.keys (
    hash character varying NOT NULL,
    owner character varying NOT NULL,
    created_at double precision NOT NULL,
    revoked_at double precision,
    id character varying DEFAULT ''::character varying NOT NULL,
    roles json DEFAULT '[]'::json NOT NULL,
    policies json DEFAULT '[]'::json NOT NULL,
    limits json DEFAULT '{}'::json NOT NULL,
    expires_at double precision
);
CREATE TABLE public.layouts (
    digest character varying NOT NULL,
    body text NOT NULL
);
CREATE TABLE public.leases (
    name character varying NOT NULL,
    holder character varying NOT NULL,
    until double precision NOT NULL,
    fence integer NOT NULL
);
CREATE TABLE public.names (
    id integer NOT NULL,
    name character varying NOT NULL
);
CREATE SEQUENCE public.names_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.names_id_seq OWNED BY public.names.id;
CREATE TABLE public.notices (
    id character varying NOT NULL,
    name character varying NOT NULL,
    policy character varying NOT NULL,
    revision character varying,
    reason character varying NOT NULL,
    link character varying NOT NULL,
    at double precision NOT NULL,
    sent_at double precision
);
CREATE TABLE public.policies (
    name character varying NOT NULL COLLATE pg_catalog."C",
    base character varying NOT NULL,
    config json NOT NULL,
    owner character varying NOT NULL,
    created_at double precision NOT NULL
);
CREATE TABLE public.purged (
    policy character varying NOT NULL,
    by character varying NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.quarantine (
    policy character varying NOT NULL,
    digest character varying NOT NULL,
    reason character varying NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.releases (
    id character varying NOT NULL,
    policy character varying NOT NULL,
    revision character varying NOT NULL,
    baseline character varying,
    step character varying NOT NULL,
    weight double precision NOT NULL,
    state character varying NOT NULL,
    settings json NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    approval character varying,
    reason character varying NOT NULL,
    version integer NOT NULL,
    canary_started_at double precision,
    skip_gates json NOT NULL,
    evidence json NOT NULL,
    approved json,
    canary_version integer,
    ramp json DEFAULT '[]'::json NOT NULL
);
CREATE TABLE public.replica_loads (
    replica character varying NOT NULL,
    policy character varying NOT NULL,
    digest character varying NOT NULL,
    fault character varying
);
CREATE TABLE public.replicas (
    id character varying NOT NULL,
    url character varying NOT NULL,
    base character varying NOT NULL,
    version character varying NOT NULL,
    incarnation character varying NOT NULL,
    beats integer NOT NULL,
    at double precision NOT NULL,
    draining boolean NOT NULL
);
CREATE TABLE public.revisions (
    id integer NOT NULL,
    digest bytea NOT NULL,
    policy character varying NOT NULL,
    base integer NOT NULL,
    parent bytea,
    step integer NOT NULL,
    rank integer NOT NULL,
    bytes bigint NOT NULL,
    layout integer NOT NULL,
    segment integer NOT NULL,
    "offset" bigint NOT NULL,
    length bigint NOT NULL,
    checksum bytea NOT NULL,
    state smallint NOT NULL,
    owner integer NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision,
    probe json,
    retired_at double precision,
    retired_by character varying,
    retired_reason character varying
);
CREATE SEQUENCE public.revisions_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.revisions_id_seq OWNED BY public.revisions.id;
CREATE TABLE public.routes (
    policy character varying NOT NULL,
    champion character varying,
    previous character varying,
    canary character varying,
    weight double precision NOT NULL,
    salt character varying NOT NULL,
    version integer NOT NULL,
    updated_at double precision NOT NULL,
    plain_units boolean DEFAULT false NOT NULL
);
CREATE TABLE public.switches (
    name character varying NOT NULL,
    "on" boolean NOT NULL
);
CREATE TABLE public.tenants (
    name character varying NOT NULL,
    limits json NOT NULL,
    weight double precision NOT NULL
);
CREATE TABLE public.tombstones (
    id integer NOT NULL,
    policy character varying NOT NULL,
    digest character varying NOT NULL,
    reason character varying NOT NULL,
    by character varying NOT NULL,
    at double precision NOT NULL,
    lifted_by character varying,
    lifted_at double precision,
    lifted_reason character varying
);
CREATE SEQUENCE public.tombstones_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.tombstones_id_seq OWNED BY public.tombstones.id;
ALTER TABLE ONLY public.changes ALTER COLUMN id SET DEFAULT nextval('public.changes_id_seq'::regclass);
ALTER TABLE ONLY public.names ALTER COLUMN id SET DEFAULT nextval('public.names_id_seq'::regclass);
ALTER TABLE ONLY public.revisions ALTER COLUMN id SET DEFAULT nextval('public.revisions_id_seq'::regclass);
ALTER TABLE ONLY public.tombstones ALTER COLUMN id SET DEFAULT nextval('public.tombstones_id_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0010');
INSERT INTO public.audit VALUES (1, 1795717658.5364416, 'os:root', NULL, 'policy.add', 'sorting', '{}', '{"base": "base", "others": [], "owner": "me", "suite": "sorting-json"}', '53711c33e6dd3fa8ac981f5d2648ecce3c42c060c6f9b9c676ad0fbf7fc8baa9');
INSERT INTO public.audit VALUES (2, 1795717658.5548363, 'os:root', NULL, 'route.change', 'sorting', '{"champion": null}', '{"champion": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}', '4cafac1ab0656e1a7a0c61d7c1c310f434093967219835ce55025a268e0fbb15');
INSERT INTO public.audit VALUES (3, 1795717658.5592465, 'os:root', NULL, 'key.create', 'dd4e9c15e4a3', '{}', '{"created_at": 1795717658.5556028, "hash": "dd4e9c15e4a3", "id": "dd4e9c15e4a3", "limits": {}, "owner": "ann", "policies": [], "roles": ["infer", "feedback"]}', '48fbb6445fb0db0132c945b34ca174d3b2f265809ef7c0906086446b1996dd54');
INSERT INTO public.bases VALUES ('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 'base', '/models/base', 1);
INSERT INTO public.catalog VALUES ('6e3cc20b2c25426183608895226defb1', 'c906b3940b86f5485d17af84bf96a1b97614075e4dbd20df8ae457ad0e4b407d');
INSERT INTO public.changes VALUES (1, 'sorting');
INSERT INTO public.changes VALUES (2, 'sorting');
INSERT INTO public.changes VALUES (3, NULL);
INSERT INTO public.keys VALUES ('dd4e9c15e4a356898aead8d215a28d25619770dcb38cc03d8b36ca6895a93fc4', 'ann', 1795717658.5556028, NULL, 'dd4e9c15e4a3', '["infer", "feedback"]', '[]', '{}', NULL);
INSERT INTO public.names VALUES (1, 's');
INSERT INTO public.names VALUES (2, 'l');
INSERT INTO public.names VALUES (3, 'base');
INSERT INTO public.names VALUES (4, 'me');
INSERT INTO public.policies VALUES ('sorting', 'base', '{"suite": "sorting-json"}', 'me', 1);
INSERT INTO public.revisions VALUES (1, '\xaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'sorting', 3, NULL, 1, 8, 64, 2, 1, 0, 64, '\xcc', 1, 4, 1, NULL, '{"accepted": true, "reason": "It reproduces."}', NULL, NULL, NULL);
INSERT INTO public.revisions VALUES (2, '\xbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb', 'sorting', 3, NULL, 1, 8, 64, 2, 1, 0, 64, '\xcc', 1, 4, 1, NULL, '{"accepted": true, "reason": "It reproduces."}', NULL, NULL, NULL);
INSERT INTO public.revisions VALUES (3, '\xcccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc', 'sorting', 3, NULL, 1, 8, 64, 2, 1, 0, 64, '\xcc', 1, 4, 1, NULL, '{"accepted": true, "reason": "It reproduces."}', NULL, NULL, NULL);
INSERT INTO public.routes VALUES ('sorting', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', NULL, NULL, 0, 'cab88860a10850b3', 1, 1795717658.5525324, false);
SELECT pg_catalog.setval('public.changes_id_seq', 3, true);
SELECT pg_catalog.setval('public.names_id_seq', 4, true);
SELECT pg_catalog.setval('public.revisions_id_seq', 3, true);
SELECT pg_catalog.setval('public.tombstones_id_seq', 1, false);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT aliases_pkey PRIMARY KEY (policy, alias);
ALTER TABLE ONLY public.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.bases
    ADD CONSTRAINT bases_pkey PRIMARY KEY (digest);
ALTER TABLE ONLY public.budgets
    ADD CONSTRAINT budgets_pkey PRIMARY KEY (subject, period);
ALTER TABLE ONLY public.catalog
    ADD CONSTRAINT catalog_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.changes
    ADD CONSTRAINT changes_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.keys
    ADD CONSTRAINT keys_pkey PRIMARY KEY (hash);
ALTER TABLE ONLY public.layouts
    ADD CONSTRAINT layouts_pkey PRIMARY KEY (digest);
ALTER TABLE ONLY public.leases
    ADD CONSTRAINT leases_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.names
    ADD CONSTRAINT names_name_key UNIQUE (name);
ALTER TABLE ONLY public.names
    ADD CONSTRAINT names_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.notices
    ADD CONSTRAINT notices_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.policies
    ADD CONSTRAINT policies_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.purged
    ADD CONSTRAINT purged_pkey PRIMARY KEY (policy);
ALTER TABLE ONLY public.quarantine
    ADD CONSTRAINT quarantine_pkey PRIMARY KEY (policy, digest);
ALTER TABLE ONLY public.releases
    ADD CONSTRAINT releases_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.replica_loads
    ADD CONSTRAINT replica_loads_pkey PRIMARY KEY (replica, policy, digest);
ALTER TABLE ONLY public.replicas
    ADD CONSTRAINT replicas_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.revisions
    ADD CONSTRAINT revisions_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.routes
    ADD CONSTRAINT routes_pkey PRIMARY KEY (policy);
ALTER TABLE ONLY public.switches
    ADD CONSTRAINT switches_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.tombstones
    ADD CONSTRAINT tombstones_pkey PRIMARY KEY (id);
CREATE INDEX notices_newest ON public.notices USING btree (at);
CREATE INDEX notices_unsent ON public.notices USING btree (at) WHERE (sent_at IS NULL);
CREATE INDEX releases_newest ON public.releases USING btree (policy, created_at);
CREATE UNIQUE INDEX releases_running ON public.releases USING btree (policy) WHERE ((state)::text = 'running'::text);
CREATE INDEX revisions_children ON public.revisions USING btree (parent, policy) WHERE (parent IS NOT NULL);
CREATE INDEX revisions_expiring ON public.revisions USING btree (expires_at) WHERE (expires_at IS NOT NULL);
CREATE UNIQUE INDEX revisions_key ON public.revisions USING btree (digest, policy);
CREATE INDEX revisions_newest ON public.revisions USING btree (policy, created_at, id);
CREATE INDEX routes_newest ON public.routes USING btree (updated_at);
CREATE UNIQUE INDEX tombstones_active ON public.tombstones USING btree (policy, digest) WHERE (lifted_at IS NULL);
CREATE TRIGGER audit_is_final BEFORE DELETE OR UPDATE OR TRUNCATE ON public.audit FOR EACH STATEMENT EXECUTE FUNCTION public.audit_is_final();
