"""Jobs on a cluster: who runs where, on how many devices, beside whom, and why a job waits.

decide(policy, state, events) -> decisions          the core: pure, seeded, without a clock
  cluster, job, placement, events                   what is passed to it and from it
  rates                                             how fast a job would run
  policies                                          one a module, with formula and source
simulate                                            the core against a virtual world
"""
