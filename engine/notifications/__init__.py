"""What people and automations are told: of releases, alarms, engines and drift, as events in Prefect."""
