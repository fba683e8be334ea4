"""How services are asked over HTTP: one client a service, which raises each fault as the error it means."""
