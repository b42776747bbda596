"""The executor of one machine: a daemon that runs jobs as `decide` says.

client --socket--> daemon --queue--> decide(policy, state, events)        the same core
                     |  |
                     |  +-- database      what was decided, before it is done
                     +-- supervisors      one process for each running job

daemon      the loop: waits for what happens, has it decided and stored, and carries it out
protocol    both ends of the socket
machine     what the daemon does to the machine: jobs' processes, and a look at the devices
queue       the state machine, which attempt to start or stop, and its log; no process, no socket
jobs        what is passed and stored: submissions, what became of them, devices, rates
paths       where all of it lies
"""
