BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0010');
CREATE TABLE aliases (
	policy VARCHAR NOT NULL, 
	alias VARCHAR NOT NULL, 
	version VARCHAR, 
	digest VARCHAR, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (policy, alias)
);
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	actor VARCHAR NOT NULL, 
	on_behalf_of VARCHAR, 
	action VARCHAR NOT NULL, 
	subject VARCHAR NOT NULL, 
	"before" VARCHAR NOT NULL, 
	"after" VARCHAR NOT NULL, 
	hash VARCHAR NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "audit" VALUES(1,1.79571765783031845088e+09,'os:root',NULL,'policy.add','sorting','{}','{"base": "base", "others": [], "owner": "me", "suite": "sorting-json"}','5f243f28f331f37f594f510520aee8555ba8db82f9d93a92e9e0d88f42b6d5bb');
INSERT INTO "audit" VALUES(2,1.79571765784126639365e+09,'os:root',NULL,'route.change','sorting','{"champion": null}','{"champion": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}','ba8bb8648326b06f1fae9a19e850142fabae4907e4a3671a5ba74f572c4215ad');
INSERT INTO "audit" VALUES(3,1.79571765784358739845e+09,'os:root',NULL,'key.create','ac1a181bd7be','{}','{"created_at": 1795717657.8419266, "hash": "ac1a181bd7be", "id": "ac1a181bd7be", "limits": {}, "owner": "ann", "policies": [], "roles": ["infer", "feedback"]}','3c53d23b6ec0bdf12eb72e888c22cef3bb37e308650837bf98cafe259a0a158d');
CREATE TABLE bases (
	digest VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	path VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (digest)
);
INSERT INTO "bases" VALUES('bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','base','/models/base',1.0);
CREATE TABLE budgets (
	subject VARCHAR NOT NULL, 
	period VARCHAR NOT NULL, 
	drawn BIGINT NOT NULL, 
	PRIMARY KEY (subject, period)
);
CREATE TABLE catalog (
	id VARCHAR NOT NULL, secret VARCHAR DEFAULT '' NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "catalog" VALUES('5e2b6549331f4b549f072c351af9ab55','93f95dd6b6ac2d2f589c0d73f3eab2ca33e62ef5c1e86f659499f82c3ba20852');
CREATE TABLE changes (
	id INTEGER NOT NULL, 
	policy VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "changes" VALUES(1,'sorting');
INSERT INTO "changes" VALUES(2,'sorting');
INSERT INTO "changes" VALUES(3,NULL);
CREATE TABLE keys (
	hash VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	revoked_at FLOAT, id VARCHAR DEFAULT '' NOT NULL, roles JSON DEFAULT '[]' NOT NULL, policies JSON DEFAULT '[]' NOT NULL, limits JSON DEFAULT '{}' NOT NULL, expires_at FLOAT, 
	PRIMARY KEY (hash)
);
INSERT INTO "keys" VALUES('ac1a181bd7be20e0c7f6c8abfc2782cd9260c4f4b83df9317b39d2a1402b62a3','ann',1.79571765784192657463e+09,NULL,'ac1a181bd7be','["infer", "feedback"]','[]','{}',NULL);
CREATE TABLE layouts (
	digest VARCHAR NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (digest)
);
CREATE TABLE leases (
	name VARCHAR NOT NULL, 
	holder VARCHAR NOT NULL, 
	until FLOAT NOT NULL, 
	fence INTEGER NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE names (
	id INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "names" VALUES(1,'s');
INSERT INTO "names" VALUES(2,'l');
INSERT INTO "names" VALUES(3,'base');
INSERT INTO "names" VALUES(4,'me');
CREATE TABLE notices (
	id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	policy VARCHAR NOT NULL, 
	revision VARCHAR, 
	reason VARCHAR NOT NULL, 
	link VARCHAR NOT NULL, 
	at FLOAT NOT NULL, 
	sent_at FLOAT, 
	PRIMARY KEY (id)
);
CREATE TABLE policies (
	name VARCHAR NOT NULL, 
	base VARCHAR NOT NULL, 
	config JSON NOT NULL, 
	owner VARCHAR NOT NULL, 
	created_at FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "policies" VALUES('sorting','base','{"suite": "sorting-json"}','me',1.0);
CREATE TABLE purged (
	policy VARCHAR NOT NULL, 
	"by" VARCHAR NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (policy)
);
CREATE TABLE quarantine (
	policy VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	at FLOAT NOT NULL, 
	PRIMARY KEY (policy, digest)
);
CREATE TABLE releases (
	id VARCHAR NOT NULL, 
	policy VARCHAR NOT NULL, 
	revision VARCHAR NOT NULL, 
	baseline VARCHAR, 
	step VARCHAR NOT NULL, 
	weight FLOAT NOT NULL, 
	state VARCHAR NOT NULL, 
	settings JSON NOT NULL, 
	created_at FLOAT NOT NULL, 
	updated_at FLOAT NOT NULL, 
	approval VARCHAR, 
	reason VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	canary_started_at FLOAT, 
	skip_gates JSON NOT NULL, 
	evidence JSON NOT NULL, approved JSON, canary_version INTEGER, ramp JSON DEFAULT '[]' NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE replica_loads (
	replica VARCHAR NOT NULL, 
	policy VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	fault VARCHAR, 
	PRIMARY KEY (replica, policy, digest)
);
CREATE TABLE replicas (
	id VARCHAR NOT NULL, 
	url VARCHAR NOT NULL, 
	base VARCHAR NOT NULL, 
	version VARCHAR NOT NULL, 
	incarnation VARCHAR NOT NULL, 
	beats INTEGER NOT NULL, 
	at FLOAT NOT NULL, 
	draining BOOLEAN NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE revisions (
	id INTEGER NOT NULL, 
	digest BLOB NOT NULL, 
	policy VARCHAR NOT NULL, 
	base INTEGER NOT NULL, 
	parent BLOB, 
	step INTEGER NOT NULL, 
	rank INTEGER NOT NULL, 
	bytes BIGINT NOT NULL, 
	layout INTEGER NOT NULL, 
	segment INTEGER NOT NULL, 
	"offset" BIGINT NOT NULL, 
	length BIGINT NOT NULL, 
	checksum BLOB NOT NULL, 
	state SMALLINT NOT NULL, 
	owner INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	expires_at FLOAT, 
	probe JSON, 
	retired_at FLOAT, 
	retired_by VARCHAR, 
	retired_reason VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "revisions" VALUES(1,X'AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA','sorting',3,NULL,1,8,64,2,1,0,64,X'CC',1,4,1.0,NULL,'{"accepted": true, "reason": "It reproduces."}',NULL,NULL,NULL);
INSERT INTO "revisions" VALUES(2,X'BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB','sorting',3,NULL,1,8,64,2,1,0,64,X'CC',1,4,1.0,NULL,'{"accepted": true, "reason": "It reproduces."}',NULL,NULL,NULL);
INSERT INTO "revisions" VALUES(3,X'CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCC','sorting',3,NULL,1,8,64,2,1,0,64,X'CC',1,4,1.0,NULL,'{"accepted": true, "reason": "It reproduces."}',NULL,NULL,NULL);
CREATE TABLE routes (
	policy VARCHAR NOT NULL, 
	champion VARCHAR, 
	previous VARCHAR, 
	canary VARCHAR, 
	weight FLOAT NOT NULL, 
	salt VARCHAR NOT NULL, 
	version INTEGER NOT NULL, 
	updated_at FLOAT NOT NULL, plain_units BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (policy)
);
INSERT INTO "routes" VALUES('sorting','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,NULL,0.0,'1df515921d33971a',1,1.79571765784036588668e+09,0);
CREATE TABLE switches (
	name VARCHAR NOT NULL, 
	"on" BOOLEAN NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE tenants (
	name VARCHAR NOT NULL, 
	limits JSON NOT NULL, 
	weight FLOAT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE tombstones (
	id INTEGER NOT NULL, 
	policy VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	"by" VARCHAR NOT NULL, 
	at FLOAT NOT NULL, 
	lifted_by VARCHAR, 
	lifted_at FLOAT, 
	lifted_reason VARCHAR, 
	PRIMARY KEY (id)
);
CREATE INDEX releases_newest ON releases (policy, created_at);
CREATE UNIQUE INDEX releases_running ON releases (policy) WHERE state = 'running';
CREATE UNIQUE INDEX tombstones_active ON tombstones (policy, digest) WHERE lifted_at IS NULL;
CREATE INDEX notices_newest ON notices (at);
CREATE INDEX notices_unsent ON notices (at) WHERE sent_at IS NULL;
CREATE INDEX routes_newest ON routes (updated_at);
CREATE UNIQUE INDEX revisions_key ON revisions (digest, policy);
CREATE INDEX revisions_newest ON revisions (policy, created_at, id);
CREATE INDEX revisions_expiring ON revisions (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX revisions_children ON revisions (parent, policy) WHERE parent IS NOT NULL;
CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'entries of the audit log are never changed'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'entries of the audit log are never changed'); END;
COMMIT;
