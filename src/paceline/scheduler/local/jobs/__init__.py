"""What is passed and stored of a machine's queue.

submission    what a user submits
records       what became of a job, and of each attempt
devices       the CPU cores or GPUs of this machine as a Cluster
rates         what is known of the jobs' rates
"""
