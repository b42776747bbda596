"""Training that is spread over institutions or devices: who takes part, and what it is paid."""
