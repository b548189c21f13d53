"""ClientApps in the shape of Flower's quickstarts: none of them knows of coterie."""
