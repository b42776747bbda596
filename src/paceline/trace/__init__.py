"""What a run did: recorded while it runs, brought onto one clock, and turned into answers.

A collector puts hooks into a framework and records events (`events`) through the native recorder,
one file per rank (`files`; docs/reference/trace-format.md). Afterwards `merge.load_run` gives the
`Trace`: all ranks on one clock (`clocks`), and what they did together (`matching`). From it
`analysis.analyse` makes, once, all that is known of the run: when ranks waited for each other
(`waits`), seconds by phase and step (`phases`), skew (`skew`), stragglers and causes (`blame`) and
traffic (`communication`). `chrome` writes Chrome's JSON.

Import the module that you need: the recording side must not load what only analyses need.
"""
