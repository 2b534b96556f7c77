"""Several brokers as one: each message goes to the first that works, and all that work are listened to.

A broker that refuses, breaks or does not confirm in time is passed over until a probe finds it well again. What went to
it and was not answered is sent again by the engine, which asks `links()`. So there may be duplicates, and order is not
kept across brokers; nothing is lost, and nothing waits for a broker that is gone while another works.
"""

from oraculo.brokers.failover.broker import FailoverBroker

__all__ = ["FailoverBroker"]
