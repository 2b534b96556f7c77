"""A deterministic simulation: the real engine, worker SDK, memory broker and store in one thread, on virtual time.

One seed decides everything: the requests, the faults, and their times. A seed that breaks a law breaks it every time.
"""
