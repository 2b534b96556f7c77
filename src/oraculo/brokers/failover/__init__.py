"""Several brokers as one: each message goes to the first that works, and all that work are listened to.

A broker that refuses, breaks or does not confirm in time is passed over until a probe finds it well again. The engine
asks `statuses()`, and sends again what went to a lost broker and was not answered. So there may be duplicates, and
order is not kept across brokers; nothing is lost, and nothing waits for a broker that is gone while another works.
"""

from oraculo.brokers.failover.broker import FailoverBroker

__all__ = ["FailoverBroker"]
