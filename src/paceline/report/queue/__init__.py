"""Shows simulated queues: policies beside each other, on a terminal and as one HTML page."""
