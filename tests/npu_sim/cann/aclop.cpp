// Descriptors and the few operators that torch_npu runs from C++ through the old `aclop` interface. Every other operator
// reaches the Python kernels of the simulator before it gets here.
#include "sim.h"

#include <cstring>
#include <string>
#include <vector>

struct aclDataBuffer {
    void* address;
    size_t bytes;
};
struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    std::vector<int64_t> shape;
    size_t elements() const {
        size_t count = 1;
        for (int64_t size : shape) count *= size;
        return count;
    }
};
struct aclopAttr {};

namespace sim {

size_t acl_element_size(aclDataType type) {
    switch (type) {
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
        case ACL_INT16: case ACL_UINT16: case ACL_FLOAT16: case ACL_BF16: return 2;
        case ACL_INT32: case ACL_UINT32: case ACL_FLOAT: return 4;
        case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: return 8;
        default: return 0;
    }
}

double load_element(const void* base, size_t index, aclDataType type) {
    switch (type) {
        case ACL_INT8: return static_cast<const int8_t*>(base)[index];
        case ACL_UINT8: case ACL_BOOL: return static_cast<const uint8_t*>(base)[index];
        case ACL_INT16: return static_cast<const int16_t*>(base)[index];
        case ACL_INT32: return static_cast<const int32_t*>(base)[index];
        case ACL_INT64: return static_cast<double>(static_cast<const int64_t*>(base)[index]);
        case ACL_FLOAT: return static_cast<const float*>(base)[index];
        case ACL_DOUBLE: return static_cast<const double*>(base)[index];
        case ACL_FLOAT16: return static_cast<double>(static_cast<const _Float16*>(base)[index]);
        case ACL_BF16: {
            uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(base)[index]) << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            return value;
        }
        default: unhandled("an element type of aclop");
    }
}

void store_element(void* base, size_t index, aclDataType type, double value) {
    switch (type) {
        case ACL_INT8: static_cast<int8_t*>(base)[index] = static_cast<int8_t>(value); return;
        case ACL_UINT8: static_cast<uint8_t*>(base)[index] = static_cast<uint8_t>(value); return;
        case ACL_BOOL: static_cast<uint8_t*>(base)[index] = value != 0; return;
        case ACL_INT16: static_cast<int16_t*>(base)[index] = static_cast<int16_t>(value); return;
        case ACL_INT32: static_cast<int32_t*>(base)[index] = static_cast<int32_t>(value); return;
        case ACL_INT64: static_cast<int64_t*>(base)[index] = static_cast<int64_t>(value); return;
        case ACL_FLOAT: static_cast<float*>(base)[index] = static_cast<float>(value); return;
        case ACL_DOUBLE: static_cast<double*>(base)[index] = value; return;
        case ACL_FLOAT16: static_cast<_Float16*>(base)[index] = static_cast<_Float16>(value); return;
        case ACL_BF16: {
            float narrow = static_cast<float>(value);
            uint32_t bits;
            memcpy(&bits, &narrow, sizeof bits);
            bool is_nan = narrow != narrow;
            bits += is_nan ? 0 : 0x7fff + ((bits >> 16) & 1);  // round to nearest even
            static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(bits >> 16);
            return;
        }
        default: unhandled("an element type of aclop");
    }
}

}  // namespace sim

SIM_API aclDataBuffer* aclCreateDataBuffer(void* address, size_t bytes) { return new aclDataBuffer{address, bytes}; }
SIM_API aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
    delete buffer;
    return ACL_SUCCESS;
}
SIM_API aclTensorDesc* aclCreateTensorDesc(aclDataType type, int rank, const int64_t* shape, aclFormat format) {
    return new aclTensorDesc{type, format, std::vector<int64_t>(shape, shape + rank)};
}
SIM_API void aclDestroyTensorDesc(const aclTensorDesc* descriptor) { delete descriptor; }
SIM_API aclDataType aclGetTensorDescType(const aclTensorDesc* descriptor) { return descriptor->type; }
SIM_API aclFormat aclGetTensorDescFormat(const aclTensorDesc* descriptor) { return descriptor->format; }
SIM_API size_t aclGetTensorDescNumDims(const aclTensorDesc* descriptor) { return descriptor->shape.size(); }
SIM_API aclError aclGetTensorDescDimV2(const aclTensorDesc* descriptor, size_t index, int64_t* size) {
    *size = descriptor->shape.at(index);
    return ACL_SUCCESS;
}
SIM_API void aclSetTensorDescName(aclTensorDesc*, const char*) {}
SIM_API aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
SIM_API aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
SIM_API aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
SIM_API aclopAttr* aclopCreateAttr() { return new aclopAttr; }
SIM_API void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }
// Fill, ZerosLike, Cast and PadV3 take what matters from their tensors, so attributes need not be kept.
SIM_API aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
SIM_API aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
SIM_API aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
SIM_API aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
SIM_API aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }

// Copies the input into the output at the offsets that the paddings [begin, end] per dimension give; the rest is `value`.
static void pad(const aclTensorDesc& in_desc, const aclDataBuffer& in, const aclTensorDesc& paddings_desc,
                const aclDataBuffer& paddings, const aclDataBuffer* value, const aclTensorDesc& out_desc, const aclDataBuffer& out) {
    const size_t rank = in_desc.shape.size(), size = sim::acl_element_size(in_desc.type);
    if (size == 0 || paddings_desc.elements() != 2 * rank) sim::unhandled("aclop PadV3 with these arguments");
    if (value && value->bytes >= size) {
        for (size_t offset = 0; offset + size <= out.bytes; offset += size)
            memcpy(static_cast<char*>(out.address) + offset, value->address, size);
    } else {
        memset(out.address, 0, out.bytes);
    }
    for (size_t source = 0; source < in_desc.elements(); source++) {
        size_t rest = source, target = 0, stride = 1;
        for (size_t dim = rank; dim-- > 0;) {
            size_t position = rest % in_desc.shape[dim];
            rest /= in_desc.shape[dim];
            target += stride * (position + static_cast<size_t>(sim::load_element(paddings.address, 2 * dim, paddings_desc.type)));
            stride *= out_desc.shape[dim];
        }
        memcpy(static_cast<char*>(out.address) + target * size, static_cast<char*>(in.address) + source * size, size);
    }
}

static aclError run(const std::string& name, int num_inputs, aclTensorDesc* input_desc[], aclDataBuffer* inputs[],
                    aclTensorDesc* output_desc[], aclDataBuffer* outputs[]) {
    sim::trace("aclop %s", name.c_str());
    aclDataBuffer* out = outputs[0];
    aclTensorDesc* out_desc = output_desc[0];
    if (name == "ZerosLike") {
        memset(out->address, 0, out->bytes);
        return ACL_SUCCESS;
    }
    if (name == "Fill" || name == "Fills") {
        const aclDataBuffer* value = inputs[num_inputs - 1];
        size_t size = sim::acl_element_size(out_desc->type);
        if (size == 0) sim::unhandled("aclop Fill of this element type");
        for (size_t offset = 0; offset + size <= out->bytes; offset += size)
            memcpy(static_cast<char*>(out->address) + offset, value->address, size);
        return ACL_SUCCESS;
    }
    if (name == "Cast") {
        for (size_t i = 0; i < input_desc[0]->elements(); i++)
            sim::store_element(out->address, i, out_desc->type, sim::load_element(inputs[0]->address, i, input_desc[0]->type));
        return ACL_SUCCESS;
    }
    if (name == "PadV3") {
        pad(*input_desc[0], *inputs[0], *input_desc[1], *inputs[1], num_inputs > 2 ? inputs[2] : nullptr, *out_desc, *out);
        return ACL_SUCCESS;
    }
    sim::unhandled(("aclop " + name).c_str());
}

SIM_API aclError aclopCompileAndExecute(const char* name, int num_inputs, const aclTensorDesc* const input_desc[],
                                        const aclDataBuffer* const inputs[], int, const aclTensorDesc* const output_desc[],
                                        aclDataBuffer* const outputs[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                        const char*, aclrtStream) {
    return run(name, num_inputs, const_cast<aclTensorDesc**>(input_desc), const_cast<aclDataBuffer**>(inputs),
               const_cast<aclTensorDesc**>(output_desc), const_cast<aclDataBuffer**>(outputs));
}
SIM_API aclError aclopCompileAndExecuteV2(const char* name, int num_inputs, aclTensorDesc* input_desc[], aclDataBuffer* inputs[],
                                          int, aclTensorDesc* output_desc[], aclDataBuffer* outputs[], aclopAttr*,
                                          aclopEngineType, aclopCompileType, const char*, aclrtStream) {
    return run(name, num_inputs, input_desc, inputs, output_desc, outputs);
}
