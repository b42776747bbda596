"""What a run did: recorded while it runs, brought onto one clock, and turned into answers.

A collector puts hooks into a framework and records events (`events`) through the native recorder,
one file per rank (`files`; docs/reference/trace-format.md). Afterwards `merge.load_run` gives the
`Trace`. From it follow who met whom when (`arrivals`), seconds by phase and step (`phases`), who
was late and why (`blame`), traffic (`communication`), and Chrome's JSON (`chrome`).

Import the module that you need: the recording side must not load what only analyses need.
"""
