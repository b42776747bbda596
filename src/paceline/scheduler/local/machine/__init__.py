"""What the daemon of a queue does to the machine.

orders          what is started for a submission
attempt         the files by which daemon and supervisor speak
supervisor      the parent of a job's processes
running         the supervisors, as the daemon sees them
device_watch    which devices are there
"""
