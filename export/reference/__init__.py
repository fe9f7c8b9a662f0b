"""What a deployed model is verified against."""

from attnforge.export.reference.model import Derived as Derived
from attnforge.export.reference.model import ReferenceModel as ReferenceModel
from attnforge.export.reference.model import at_precision as at_precision
from attnforge.export.reference.truth import Data as Data
from attnforge.export.reference.truth import inputs_and_cases as inputs_and_cases
from attnforge.export.reference.truth import kept as kept
from attnforge.export.reference.truth import write_reference as write_reference
