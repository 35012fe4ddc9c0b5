"""The definition of what runs where and when: prefect.yaml, configs, automations."""
