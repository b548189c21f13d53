"""Charts and bills of images are held against tools of others: ``pip install 'coterie[deploy]'``.

``make nightly`` installs them; where they are not, these tests are left out.
"""

from importlib.util import find_spec

collect_ignore = [
    *(
        ["test_chart.py"]
        if not (find_spec("helm_python") and find_spec("kubernetes_validate"))
        else []
    ),
    *(["test_images.py"] if not find_spec("cyclonedx") else []),
]
