/-! What `import Lean` brings in the tests: what `proof_check.lean` needs, as it lies compiled in the package. Where a
number stands for a type of Lean's, it is how the compiled code has that type's value. -/
set_option genCtorIdx false
set_option genSizeOf false
set_option genInjectivity false
namespace Lean
axiom Expr : Type
structure Options where
  map : Nat
  hasTrace : Bool
def Options.empty : Options := ⟨1, .false⟩
axiom Environment : Type
axiom Import : Type
@[extern "lean"] axiom Name.mkStr1 (a : String) : Name
@[extern "lean"] axiom Name.mkStr2 (a b : String) : Name
@[extern "lean"] axiom Name.beq (a b : Name) : Bool
@[extern "lean"] axiom Name.toString (n : Name) (escape : Bool := true) (isToken : String → Bool := fun _ => false) : String
structure ConstantVal where
  name : Name
  levelParams : List Name
  type : Expr
structure DefinitionVal extends ConstantVal where
  value : Expr
structure TheoremVal extends ConstantVal where
  value : Expr
  all : List Name
inductive ConstantInfo where
  | axiomInfo (val : ConstantVal)
  | defnInfo (val : DefinitionVal)
  | thmInfo (val : TheoremVal)
  | opaqueInfo (val : DefinitionVal)
  | quotInfo (val : ConstantVal)
  | inductInfo (val : ConstantVal)
  | ctorInfo (val : ConstantVal)
  | recInfo (val : ConstantVal)
structure ModuleData where
  isModule : Bool
  imports : Array Import
  constNames : Array Name
  constants : Array ConstantInfo
  extraConstNames : Array Name
  entries : Array Name
axiom CompactedRegion : Type
@[extern "lean"] axiom readModuleData : String → IO (Prod ModuleData CompactedRegion)
@[extern "lean"] axiom importModules (imports : Array Import) (opts : Options) (trustLevel : Nat := 0)
  (plugins : Array String := ⟨.nil⟩) (leakEnv : Nat := 0) (loadExts : Nat := 0) (level : Nat := 2) (arts : Nat := 1) :
  IO Environment
@[extern "lean"] axiom Environment.find? (env : Environment) (n : Name) (skipRealize : Nat := 0) : Option ConstantInfo
@[extern "lean"] axiom ConstantInfo.name (info : ConstantInfo) : Name
@[extern "lean"] axiom ConstantInfo.type (info : ConstantInfo) : Expr
@[extern "lean"] axiom Expr.getUsedConstants (e : Expr) : Array Name
def NameSet : Type := Nat
def NameSet.empty : NameSet := (1 : Nat)
@[extern "lean"] axiom NameSet.insert (s : NameSet) (n : Name) : NameSet
@[extern "lean"] axiom NameSet.contains (s : NameSet) (n : Name) : Bool
end Lean
inductive Map.Bucket where
  | nil : Bucket
  | cons (name : Lean.Name) (info : Lean.ConstantInfo) (rest : Bucket) : Bucket
structure Map where
  size : Nat := 0
  buckets : Array Map.Bucket := .mk (.cons .nil .nil)
abbrev Std.HashMap (_ _ : Type) : Type := Map
def Map.insert (map : Map) (name : Lean.Name) (info : Lean.ConstantInfo) : Map := match map.buckets.toList with
  | .cons bucket _ => ⟨map.size, .mk (.cons (.cons name info bucket) .nil)⟩
  | .nil => map
def Map.Bucket.get? (name : Lean.Name) (bucket : Map.Bucket) : Option Lean.ConstantInfo := match bucket with
  | .nil => none
  | .cons key info rest => match key.beq name with
    | true => some info
    | false => get? name rest
def Map.get? (map : Map) (name : Lean.Name) : Option Lean.ConstantInfo := match map.buckets.toList with
  | .cons bucket _ => bucket.get? name
  | .nil => none
@[extern "lean"] axiom Lean.Environment.replay (new : Std.HashMap Lean.Name Lean.ConstantInfo) (env : Lean.Environment) :
  IO Lean.Environment
