"""How commands speak to the daemon of a queue.

messages       one line there, one back
client         the end of the commands
connections    the end of the daemon
requests       what the daemon makes of a request
"""
