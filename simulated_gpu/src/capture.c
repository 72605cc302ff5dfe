#include "sim.h"
CUresult nvs_sim_capture_unsafe(void) { return CUDA_SUCCESS; }
CUresult nvs_sim_capture_check(sim_stream *stream) { return CUDA_SUCCESS; }
CUresult nvs_sim_capture_implicit(sim_stream *stream) { return CUDA_SUCCESS; }
CUresult nvs_sim_capture_add(sim_stream *stream, const sim_work *work) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult nvs_sim_capture_record(sim_stream *stream, sim_event *event, bool external) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult nvs_sim_capture_wait(sim_stream *stream, sim_event *event, bool external, bool *handled) { return CUDA_ERROR_NOT_SUPPORTED; }
bool nvs_sim_capture_context(sim_context *context) { return false; }
