"""The executor of one machine: a daemon that runs jobs as `decide` says.

client --socket--> daemon --queue--> decide(policy, state, events)        the same core
                     |  |
                     |  +-- database      what was decided, before it is done
                     +-- supervisors      one process for each running job

submission, records     what is passed and stored
devices                 the CPU cores or GPUs of this machine as a Cluster
queue                   the state machine: which attempt to start or stop; no input or output
attempt, supervisor     a job's process, its files, its exit status
database, daemon        the shell: SQLite, socket, processes
client, replay          the other side of the socket; the log, decided again
"""
