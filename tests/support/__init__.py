"""What tests share: how they start processes, and what they start, read and compare."""
