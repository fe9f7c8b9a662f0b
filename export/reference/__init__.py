"""What a deployed model is verified against."""

from attnforge.export.reference.model import Derived as Derived
from attnforge.export.reference.model import ReferenceModel as ReferenceModel
from attnforge.export.reference.model import at_precision as at_precision
from attnforge.export.reference.truth import Data as Data
from attnforge.export.reference.truth import kept as kept
from attnforge.export.reference.truth import stored_inputs as stored_inputs
from attnforge.export.reference.truth import write_reference as write_reference
