"""The queue of a machine as a state machine, and its log: nothing here starts or asks a process.

turns         inputs, what is kept of a job, and what an instant changed
job_queue     inputs and a time in, things to do out
setup         what decisions depend on beside events
database      SQLite: jobs, attempts, events and decisions
resume        the queue of a log; a new log that goes on
replay        the log, decided again and compared
"""
