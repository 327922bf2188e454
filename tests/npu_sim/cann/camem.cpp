// vllm-ascend's compiled extension, as far as sleep mode goes: device memory whose pages can be given back while its
// address stays. The wheel's own is built for another torch and needs the operator libraries of CANN.
// Interface: device_allocator/camem.py of vllm-ascend 0.23 (init_module, python_create_and_map,
// python_unmap_and_release; my_malloc and my_free for torch_npu's pluggable allocator).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstdio>

#include "acl/acl.h"

namespace {

PyObject* on_malloc = nullptr;  // called with (device, bytes, address, handle cell) after memory was reserved
PyObject* on_free = nullptr;    // called with the address, gives the same four back

bool ok(aclError code, const char* what) {
    if (code == ACL_SUCCESS) return true;
    fprintf(stderr, "[npu-sim] sleep mode: %s failed with %d\n", what, code);
    return false;
}

aclrtPhysicalMemProp properties(int device) {
    aclrtPhysicalMemProp wanted = {};
    wanted.handleType = ACL_MEM_HANDLE_TYPE_NONE;
    wanted.allocationType = ACL_MEM_ALLOCATION_TYPE_PINNED;
    wanted.memAttr = ACL_HBM_MEM_HUGE;
    wanted.location.id = device;
    wanted.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    return wanted;
}

bool map_pages(int device, size_t bytes, void* address, aclrtDrvMemHandle* cell) {
    aclrtPhysicalMemProp wanted = properties(device);
    return ok(aclrtMallocPhysical(cell, bytes, &wanted, 0), "aclrtMallocPhysical") &&
           ok(aclrtMapMem(address, bytes, 0, *cell, 0), "aclrtMapMem");
}

bool unmap_pages(void* address, aclrtDrvMemHandle* cell) {
    return ok(aclrtUnmapMem(address), "aclrtUnmapMem") && ok(aclrtFreePhysical(*cell), "aclrtFreePhysical");
}

struct Block {
    unsigned long long device, bytes, address, cell;
    void* at() const { return reinterpret_cast<void*>(address); }
    aclrtDrvMemHandle* handle() const { return reinterpret_cast<aclrtDrvMemHandle*>(cell); }
};

bool parse(PyObject* arguments, Block* block) {
    return PyArg_ParseTuple(arguments, "KKKK", &block->device, &block->bytes, &block->address, &block->cell);
}

PyObject* init_module(PyObject*, PyObject* arguments) {
    PyObject *malloc_function, *free_function;
    if (!PyArg_ParseTuple(arguments, "OO", &malloc_function, &free_function)) return nullptr;
    Py_INCREF(malloc_function);
    Py_INCREF(free_function);
    Py_XDECREF(on_malloc);
    Py_XDECREF(on_free);
    on_malloc = malloc_function;
    on_free = free_function;
    Py_RETURN_NONE;
}

PyObject* failed(const char* what) {
    PyErr_Format(PyExc_RuntimeError, "npu-sim: sleep mode could not %s memory", what);
    return nullptr;
}

PyObject* create_and_map(PyObject*, PyObject* arguments) {
    Block block;
    if (!parse(arguments, &block)) return nullptr;
    if (!map_pages(static_cast<int>(block.device), block.bytes, block.at(), block.handle())) return failed("map");
    Py_RETURN_NONE;
}

PyObject* unmap_and_release(PyObject*, PyObject* arguments) {
    Block block;
    if (!parse(arguments, &block)) return nullptr;
    if (!unmap_pages(block.at(), block.handle())) return failed("unmap");
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"init_module", init_module, METH_VARARGS, "Takes what is called when memory comes and goes."},
    {"python_create_and_map", create_and_map, METH_VARARGS, "Gives a reserved range pages."},
    {"python_unmap_and_release", unmap_and_release, METH_VARARGS, "Takes the pages of a range away; the range stays reserved."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "vllm_ascend_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) void* my_malloc(ssize_t bytes, int device, aclrtStream) {
    aclrtPhysicalMemProp wanted = properties(device);
    size_t granularity = 0;
    void* address = nullptr;
    if (!ok(aclrtMemGetAllocationGranularity(&wanted, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &granularity), "granularity"))
        return nullptr;
    size_t aligned = (static_cast<size_t>(bytes) + granularity - 1) / granularity * granularity;
    if (!ok(aclrtReserveMemAddress(&address, aligned, 0, nullptr, 0), "aclrtReserveMemAddress")) return nullptr;
    auto* cell = new aclrtDrvMemHandle;
    if (!map_pages(device, aligned, address, cell)) return nullptr;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* result = PyObject_CallFunction(on_malloc, "((KKKK))", static_cast<unsigned long long>(device),
                                             static_cast<unsigned long long>(aligned),
                                             reinterpret_cast<unsigned long long>(address),
                                             reinterpret_cast<unsigned long long>(cell));
    if (!result) PyErr_Print();
    Py_XDECREF(result);
    PyGILState_Release(state);
    return address;
}

extern "C" __attribute__((visibility("default"))) void my_free(void* address, ssize_t, int, aclrtStream) {
    Block block;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject* result = PyObject_CallFunction(on_free, "K", reinterpret_cast<unsigned long long>(address));
    bool known = result && parse(result, &block);
    if (!known) PyErr_Print();
    Py_XDECREF(result);
    PyGILState_Release(state);
    if (!known) return;
    unmap_pages(block.at(), block.handle());
    ok(aclrtReleaseMemAddress(block.at()), "aclrtReleaseMemAddress");
    delete block.handle();
}

PyMODINIT_FUNC PyInit_vllm_ascend_C() { return PyModule_Create(&definition); }
