"""The compiled steps of a model: a batch enters, updated variables and a `StepResult` leave."""
