"""What composes the rest of Paceline into one answer."""
