"""Several brokers as one: each message goes to the first that works, and every one that works is consumed.

A broker that refuses, breaks or does not confirm in time is left out until a probe finds it well. The engine reads
`statuses()` and sends again what a lost broker took and nobody answered. So messages may be duplicated and may overtake
each other. None is lost, and none waits for a broker that is away while another works.
"""

from oraculo.brokers.failover.broker import FailoverBroker

__all__ = ["FailoverBroker"]
