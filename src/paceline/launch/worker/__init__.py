"""What runs in the process of a rank: ``python -m paceline.launch.worker`` starts it.

The other modules change torch. They are imported by name, when the rank has its threads and cores.
"""
