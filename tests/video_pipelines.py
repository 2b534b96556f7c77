"""The seven video pipelines that are built in, and the steps of each."""

VIDEO_PIPELINES = {
    "enhanced-images-only": ["ENHANCED_IMAGES"],
    "viral-copy-only": ["VIRAL_COPY"],
    "voice-over-only": ["VIRAL_COPY", "VOICE_OVER"],
    "promotional-video-basic": ["ENHANCED_IMAGES", "PROMOTIONAL_VIDEO"],
    "promotional-video-with-text": ["ENHANCED_IMAGES", "VIRAL_COPY", "PROMOTIONAL_VIDEO"],
    "promotional-video-with-voiceover": ["ENHANCED_IMAGES", "VIRAL_COPY", "VOICE_OVER", "PROMOTIONAL_VIDEO"],
    "promotional-video-full": ["ENHANCED_IMAGES", "VIRAL_COPY", "VOICE_OVER", "CAPTIONS", "PROMOTIONAL_VIDEO"],
}
