"""Plans what should run where: pure functions from jobs and capacities to groups of jobs.

candidates      what each job could run on, and what its progress is worth
assignment      device types and numbers of devices, by prices
sharing         which jobs share devices
"""
