"""What a launcher starts on its node to serve packs to the ranks, and to drain what they write."""
