"""fedgraft: adapt one pretrained vision model to data that many owners keep private."""
