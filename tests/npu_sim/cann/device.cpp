// Devices, contexts, streams, events, versions and error text. Everything runs synchronously on the calling thread.
#include "sim.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>

namespace sim {

static const char* text_setting(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

const Settings& settings() {
    static const Settings values = {
        atoi(text_setting("NPU_SIM_DEVICES", "1")),
        static_cast<size_t>(atof(text_setting("NPU_SIM_MEMORY_GIB", "64")) * (1ull << 30)),
        atof(text_setting("NPU_SIM_TIMEOUT_S", "60")),
        atoi(text_setting("NPU_SIM_TRACE", "0")) != 0,
        text_setting("NPU_SIM_RUN_DIR", "/dev/shm"),
        text_setting("NPU_SIM_SOC", "Ascend910B3"),
    };
    return values;
}

void complain(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("[npu-sim] ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    fflush(stderr);
    va_end(arguments);
}

void trace(const char* format, ...) {
    if (!settings().trace) return;
    va_list arguments;
    va_start(arguments, format);
    fputs("[npu-sim] ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

void unhandled(const char* what) {
    complain("%s is not simulated; add it to tests/npu_sim/cann instead of guessing its result", what);
    abort();
}

static thread_local int device = -1;
int current_device() { return device; }

}  // namespace sim

// Generated stubs of the symbols the wheel links but nothing here defines end up in this call.
SIM_API void npu_sim_unhandled(const char* name) { sim::unhandled(name); }

using sim::settings;

static aclError check_device(int32_t id) { return id >= 0 && id < settings().device_count ? ACL_SUCCESS : 107001; }

// ---- start, devices, contexts
SIM_API aclError aclInit(const char*) { return ACL_SUCCESS; }
SIM_API aclError aclFinalize() { return ACL_SUCCESS; }
SIM_API aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = settings().device_count;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtSetDevice(int32_t id) {
    if (aclError error = check_device(id)) return error;
    sim::device = id;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtGetDevice(int32_t* id) {
    if (sim::device < 0) return 107002;  // no context in this thread
    *id = sim::device;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtResetDevice(int32_t id) { return check_device(id); }
SIM_API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logical) {
    *logical = user;
    return check_device(user);
}
SIM_API aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t* flags, int32_t* active) {
    if (flags) *flags = 0;
    *active = sim::device >= 0;
    return check_device(id);
}
// A context is its device number plus one, so that no context is a null pointer.
SIM_API aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (sim::device < 0) return 107002;
    *context = reinterpret_cast<void*>(static_cast<uintptr_t>(sim::device) + 1);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtSetCurrentContext(aclrtContext context) {
    int32_t id = static_cast<int32_t>(reinterpret_cast<uintptr_t>(context)) - 1;
    if (aclError error = check_device(id)) return error;
    sim::device = id;
    return ACL_SUCCESS;
}
SIM_API const char* aclrtGetSocName() { return settings().soc_name; }
SIM_API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
    switch (attribute) {
        case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; return ACL_SUCCESS;
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 20; return ACL_SUCCESS;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = settings().memory_bytes; return ACL_SUCCESS;
        case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192 << 20; return ACL_SUCCESS;
        case ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE: *value = 192 << 10; return ACL_SUCCESS;
        default: return 207000;  // ACL_ERROR_RT_FEATURE_NOT_SUPPORT
    }
}
SIM_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
    switch (info) {
        case ACL_DEVICE_INFO_AI_CORE_NUM: *value = 20; return ACL_SUCCESS;
        case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = 40; return ACL_SUCCESS;
        case ACL_DEVICE_INFO_L2_SIZE: *value = 192 << 20; return ACL_SUCCESS;
        default: return 207000;
    }
}
SIM_API aclError aclrtGetDeviceUtilizationRate(int32_t id, aclrtUtilizationInfo* info) {
    memset(info, 0, sizeof *info);
    return check_device(id);
}
SIM_API aclError aclrtDeviceGetUuid(int32_t id, aclrtUuid* uuid) {
    memset(uuid, 0, sizeof *uuid);
    snprintf(reinterpret_cast<char*>(uuid), sizeof *uuid, "npu-sim-%d", id);
    return check_device(id);
}
SIM_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
    *can = 1;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtDeviceEnablePeerAccess(int32_t id, uint32_t) { return check_device(id); }
SIM_API aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}
SIM_API aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
SIM_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
    *value = type == ACL_RT_DEV_RES_VECTOR_CORE ? 40 : 20;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
    return aclrtGetDeviceResLimit(0, type, value);
}

// ---- streams: a number each; work is done when it is submitted
namespace {
struct Stream {
    int32_t id;
};
int32_t stream_count = 0;
}  // namespace
SIM_API aclError aclrtCreateStream(aclrtStream* stream) {
    *stream = new Stream{__sync_add_and_fetch(&stream_count, 1)};
    return ACL_SUCCESS;
}
SIM_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
SIM_API aclError aclrtDestroyStream(aclrtStream stream) {
    delete static_cast<Stream*>(stream);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
SIM_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
    *id = stream ? static_cast<Stream*>(stream)->id : 0;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }
SIM_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
    *flag = 0;
    return ACL_SUCCESS;
}
// ---- graphs: the allocator of torch_npu sees a capture; what is captured, and its replay, are in simulator/graphs.py
static aclmdlRI captured = nullptr;
bool sim::capturing() { return captured != nullptr; }
SIM_API aclError aclmdlRICaptureBegin(aclrtStream, aclmdlRICaptureMode) {
    if (captured) return 107030;  // one capture at a time
    captured = new char;
    return ACL_SUCCESS;
}
SIM_API aclError aclmdlRICaptureEnd(aclrtStream, aclmdlRI* model) {
    if (!captured) return 107030;
    *model = captured;
    captured = nullptr;
    return ACL_SUCCESS;
}
SIM_API aclError aclmdlRIDestroy(aclmdlRI model) {
    delete static_cast<char*>(model);
    return ACL_SUCCESS;
}
SIM_API aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
    *status = captured ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    *model = captured;
    return ACL_SUCCESS;
}
SIM_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode*) { return ACL_SUCCESS; }
SIM_API aclError aclmdlRIExecuteAsync(aclmdlRI, aclrtStream) { sim::unhandled("a graph that is not replayed by simulator/graphs.py"); }

SIM_API aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* argument) {
    function(argument);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream) {
    function(data);
    return ACL_SUCCESS;
}
// The callback thread of torch_npu asks for work; there never is any, because callbacks run when they are launched.
SIM_API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SIM_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SIM_API aclError aclrtProcessReport(int32_t) {
    usleep(1000);
    return 107019;  // ACL_ERROR_RT_REPORT_TIMEOUT
}

// ---- events: host clock
namespace {
struct Event {
    timespec time;
    bool recorded;
};
double nanoseconds(const Event& event) { return event.time.tv_sec * 1e9 + event.time.tv_nsec; }
}  // namespace
SIM_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
    *event = new Event{};
    return ACL_SUCCESS;
}
SIM_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
SIM_API aclError aclrtDestroyEvent(aclrtEvent event) {
    delete static_cast<Event*>(event);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
    Event* record = static_cast<Event*>(event);
    clock_gettime(CLOCK_MONOTONIC, &record->time);
    record->recorded = true;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
    static_cast<Event*>(event)->recorded = false;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
SIM_API aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
    Event *first = static_cast<Event*>(start), *second = static_cast<Event*>(end);
    if (!first->recorded || !second->recorded) return 107000;
    *milliseconds = static_cast<float>((nanoseconds(*second) - nanoseconds(*first)) / 1e6);
    return ACL_SUCCESS;
}
SIM_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
    *microseconds = static_cast<uint64_t>(nanoseconds(*static_cast<Event*>(event)) / 1e3);
    return ACL_SUCCESS;
}

// ---- versions, options, error text, logging, profiling hooks
SIM_API const char* aclGetRecentErrMsg() { return "[npu-sim] the runtime is simulated and keeps no error text"; }
SIM_API aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
SIM_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
SIM_API aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    memset(version, 0, sizeof *version);
    strcpy(version->version, "9.1.0");
    return ACL_SUCCESS;
}
SIM_API aclError aclsysGetVersionStr(char*, char* version) {
    strcpy(version, "9.1.0");
    return ACL_SUCCESS;
}
SIM_API aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
    *value = 1;
    return ACL_SUCCESS;
}
SIM_API aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
    if (length) *value = 0;
    return ACL_SUCCESS;
}
SIM_API size_t aclGetCompileoptSize(aclCompileOpt) { return 1; }
SIM_API aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
    if (actual) *actual = timeout;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
SIM_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }
SIM_API aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
    *value = 0;
    return ACL_SUCCESS;
}
SIM_API aclError aclrtGetMemUceInfo(int32_t, aclrtMemUceInfo*, size_t, size_t* count) {
    *count = 0;
    return ACL_SUCCESS;
}
SIM_API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
SIM_API uint64_t MsprofSysCycleTime() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
SIM_API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
SIM_API int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
SIM_API int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
SIM_API int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
SIM_API uint64_t MsprofGetHashId(const char* text, size_t length) {
    uint64_t hash = 14695981039346656037ull;  // FNV-1a
    for (size_t i = 0; i < length; i++) hash = (hash ^ static_cast<unsigned char>(text[i])) * 1099511628211ull;
    return hash;
}
