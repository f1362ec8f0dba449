"""PaddleOCR-VL: as Qwen2-VL, but that a picture narrower than a group of patches is enlarged first.

Rules: transformers ``image_processing_pil_paddleocr_vl.py`` and ``modeling_paddleocr_vl.py``.
"""

from tessera.models.family import ImagePlan
from tessera.models.qwen2_vl.config import PixelRange
from tessera.models.qwen2_vl.processor import Qwen2VL


class PaddleOcrVL(Qwen2VL):
    user_tokens = ()
    default_tokens = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")

    def plan(self, width: int, height: int, policy: PixelRange) -> ImagePlan:
        least = self.merge * self.patch
        if height < least:
            width, height = round(width * least / height), least
        if width < least:
            width, height = least, round(height * least / width)
        return super().plan(width, height, policy)
