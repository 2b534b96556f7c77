"""A deterministic simulation: the real engine, worker SDK, memory broker and store in one thread, on virtual time.

One seed decides everything: what is asked, what fails, and when. A seed that breaks a law breaks it again each time.
"""
