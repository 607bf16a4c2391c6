"""The common tests of transformers, as one package of two folders.

One is the `tests` folder of the source distribution. It lacks what lies in subfolders and what is not named `test_*`;
this folder has, in their places, the few names that the suite imports from there.
"""

from suite import suite_folder

__path__.append(str(suite_folder()))
