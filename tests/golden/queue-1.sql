BEGIN TRANSACTION;
CREATE TABLE attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL, attempt TEXT NOT NULL, live INTEGER NOT NULL,
    PRIMARY KEY (job, number));
INSERT INTO "attempts" VALUES('done',1,'{"version": 1, "job": "done", "number": 1, "placement": {"parts": [{"node": "local", "devices": [0]}], "share": 1.0}, "stop": "", "began": true}',0);
INSERT INTO "attempts" VALUES('long',1,'{"version": 1, "job": "long", "number": 1, "placement": {"parts": [{"node": "local", "devices": [0, 1]}], "share": 1.0}, "stop": "preempt", "began": true}',1);
CREATE TABLE decisions (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, instant INTEGER NOT NULL,
    at_s REAL NOT NULL, decision TEXT NOT NULL);
INSERT INTO "decisions" VALUES(1,1,1,1.0,'{"action": {"name": "done", "placement": {"parts": [{"devices": [0], "node": "local"}], "share": 1.0}, "reason": "0.00 h left, rank 1 of 1", "rejected": ""}, "at_s": 1.0, "inputs": "444b71ebf9898c84f8dddc10df85d5e4", "kind": "Start", "version": 1}');
INSERT INTO "decisions" VALUES(2,1,4,4.0,'{"action": {"name": "long", "placement": {"parts": [{"devices": [0, 1], "node": "local"}], "share": 1.0}, "reason": "0.28 h left, rank 1 of 1", "rejected": ""}, "at_s": 4.0, "inputs": "f3321d17a2de5f8ebdc1f06e0f05b9e9", "kind": "Start", "version": 1}');
INSERT INTO "decisions" VALUES(3,1,7,7.0,'{"action": {"name": "long", "reason": "jobs with less left need it", "rejected": ""}, "at_s": 7.0, "inputs": "ef0ed708c8ad8baa3af9a4f56361b342", "kind": "Preempt", "version": 1}');
INSERT INTO "decisions" VALUES(4,1,7,7.0,'{"action": {"name": "short", "placement": {"parts": [{"devices": [0], "node": "local"}], "share": 1.0}, "reason": "0.00 h left, rank 1 of 2", "rejected": "long on 2 devices: 0.28 h left, rank 2 of 2"}, "at_s": 7.0, "inputs": "acad51f9bcdc4371d328f8a78cd4d1f4", "kind": "Start", "version": 1}');
INSERT INTO "decisions" VALUES(5,1,8,8.0,'{"action": {"name": "other", "placement": {"parts": [{"devices": [1], "node": "local"}], "share": 1.0}, "reason": "0.00 h left, rank 2 of 3", "rejected": "long on 2 devices: 0.28 h left, rank 3 of 3"}, "at_s": 8.0, "inputs": "1d03d51bc468e1708c147d7afbd91c5b", "kind": "Start", "version": 1}');
CREATE TABLE events (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, instant INTEGER NOT NULL,
    at_s REAL NOT NULL, event TEXT NOT NULL);
INSERT INTO "events" VALUES(1,1,1,1.0,'{"kind": "Submitted", "version": 1, "at_s": 1.0, "job": {"name": "done", "submitted_s": 0.0, "devices": 1, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 5.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}}');
INSERT INTO "events" VALUES(2,1,2,1.5,'{"kind": "Started", "version": 1, "at_s": 1.5, "name": "done"}');
INSERT INTO "events" VALUES(3,1,3,3.0,'{"kind": "Ended", "version": 1, "at_s": 3.0, "name": "done"}');
INSERT INTO "events" VALUES(4,1,4,4.0,'{"kind": "Submitted", "version": 1, "at_s": 4.0, "job": {"name": "long", "submitted_s": 0.0, "devices": 2, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 1000.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}}');
INSERT INTO "events" VALUES(5,1,5,4.5,'{"kind": "Started", "version": 1, "at_s": 4.5, "name": "long"}');
INSERT INTO "events" VALUES(6,1,6,6.5,'{"kind": "Measured", "version": 1, "at_s": 6.5, "name": "long", "work_done": 3.0, "rate": 1.5}');
INSERT INTO "events" VALUES(7,1,7,7.0,'{"kind": "Submitted", "version": 1, "at_s": 7.0, "job": {"name": "short", "submitted_s": 0.0, "devices": 1, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 1.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}}');
INSERT INTO "events" VALUES(8,1,8,8.0,'{"kind": "Submitted", "version": 1, "at_s": 8.0, "job": {"name": "other", "submitted_s": 0.0, "devices": 1, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 1.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}}');
INSERT INTO "events" VALUES(9,1,9,8.5,'{"kind": "Cancelled", "version": 1, "at_s": 8.5, "name": "other"}');
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, token TEXT NOT NULL,
    submission TEXT NOT NULL, entry TEXT NOT NULL);
INSERT INTO "jobs" VALUES(1,'done','token of done','{"version": 1, "job": {"name": "done", "submitted_s": 0.0, "devices": 1, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 5.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}, "command": ["true"], "folder": "/", "environ": {}, "launcher": "", "stop_signal": "SIGUSR1", "grace_s": 30.0, "token": "token of done"}','{"status": "done", "starts": 1, "own_stops": 0, "submitted_s": 1.0, "began_s": 1.5, "ended_s": 3.0, "work_done": 0.0, "rate": null, "exit_code": 0, "reason": ""}');
INSERT INTO "jobs" VALUES(2,'long','token of long','{"version": 1, "job": {"name": "long", "submitted_s": 0.0, "devices": 2, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 1000.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}, "command": ["true"], "folder": "/", "environ": {}, "launcher": "", "stop_signal": "SIGUSR1", "grace_s": 30.0, "token": "token of long"}','{"status": "stopping", "starts": 1, "own_stops": 0, "submitted_s": 4.0, "began_s": 4.5, "ended_s": null, "work_done": 3.0, "rate": 1.5, "exit_code": null, "reason": "jobs with less left need it"}');
INSERT INTO "jobs" VALUES(3,'short','token of short','{"version": 1, "job": {"name": "short", "submitted_s": 0.0, "devices": 1, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 1.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}, "command": ["true"], "folder": "/", "environ": {}, "launcher": "", "stop_signal": "SIGUSR1", "grace_s": 30.0, "token": "token of short"}','{"status": "waiting", "starts": 0, "own_stops": 0, "submitted_s": 7.0, "began_s": null, "ended_s": null, "work_done": 0.0, "rate": null, "exit_code": null, "reason": "0.00 h left, rank 1 of 2"}');
INSERT INTO "jobs" VALUES(4,'other','token of other','{"version": 1, "job": {"name": "other", "submitted_s": 0.0, "devices": 1, "min_devices": 0, "max_devices": 0, "device_types": [], "profile": "", "work": 1.0, "tenant": "", "weight": 1.0, "deadline_s": null, "memory_bytes": 0, "dataset": "", "restart_s": 0.0, "start_s": 0.0, "preemptible": true, "shares": true}, "command": ["true"], "folder": "/", "environ": {}, "launcher": "", "stop_signal": "SIGUSR1", "grace_s": 30.0, "token": "token of other"}','{"status": "cancelled", "starts": 0, "own_stops": 0, "submitted_s": 8.0, "began_s": null, "ended_s": 8.5, "work_done": 0.0, "rate": null, "exit_code": null, "reason": "its user cancelled it"}');
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, policy TEXT NOT NULL, devices TEXT NOT NULL, rates TEXT NOT NULL);
INSERT INTO "segments" VALUES(1,'srtf','{"version": 1, "cluster": {"nodes": [{"name": "local", "device_type": "cpu", "devices": 2, "memory_bytes": 0, "switches": []}], "levels": []}, "cores": [0, 1], "gpus": []}','{"version": 1, "alone": {}, "sharing": {"used": {}, "pairs": {}, "most": 1, "interference": 0.05}}');
CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "settings" VALUES('format','1');
INSERT INTO "settings" VALUES('first_s','1700000000.0');
CREATE INDEX events_by_instant ON events (segment, instant);
CREATE INDEX decisions_by_instant ON decisions (segment, instant);
CREATE INDEX jobs_by_token ON jobs (token);
COMMIT;
