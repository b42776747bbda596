"""What a scheduler knows of jobs and devices, and how events and actions change it."""
