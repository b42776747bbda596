"""What would make a run faster: figures of the run, and rules from them to a change."""
