"""What runs where and when: prefect.yaml, configs, automations."""
